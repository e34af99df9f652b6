/* The least that reading and writing values over Redis can cost: one thread, poll, a window of
 * requests in flight, nothing checked but the length of replies.
 *
 *   ideal_redis PORT BYTES COUNT CONNECTIONS WINDOW   values k:0 .. k:COUNT-1
 *   ideal_redis raw BYTES COUNT 1 WINDOW              a fork of its own as the server
 *
 * Each line "get" or "set" on its input has it move all values, over the same connections each time.
 * Each lands in, or comes from, a slot of its own, as in a cache's host tier.
 *
 * Answers each with seconds, and seconds of this process on a processor. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <fcntl.h>

#define MOST_IN_FLIGHT 64

static long value_bytes, count, next_key, done;
static int window, is_set, usual, is_the_only;
static char *slots, trailer[2];

struct connection {
    int fd, in_flight, head_used;
    long body_left;              /* of the value being received, CRLF included */
    char head[64];
    struct iovec out[3];
    int out_pieces, out_at;
    char request[128];
    long keys[MOST_IN_FLIGHT];   /* of the requests in flight, the oldest at keys[first] */
    int first;
};

static char *slot_of(long key) { return slots + key * value_bytes; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void die(const char *what) { perror(what); exit(1); }

static int connect_to(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    /* BBR, where the system has it, holds back long values, and all over one connection. */
    if (value_bytes > 1 << 20 || is_the_only)
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

static void next_request(struct connection *c) {
    char key[32], *value = slot_of(next_key);
    c->keys[(c->first + c->in_flight) % MOST_IN_FLIGHT] = next_key;
    int key_bytes = snprintf(key, sizeof key, "k:%ld", next_key++);
    int n;
    if (is_set)
        n = snprintf(c->request, sizeof c->request, "*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%ld\r\n",
                     key_bytes, key, value_bytes);
    else
        n = snprintf(c->request, sizeof c->request, "*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", key_bytes, key);
    c->out[0] = (struct iovec){c->request, n};
    c->out[1] = (struct iovec){value, value_bytes};
    c->out[2] = (struct iovec){"\r\n", 2};
    c->out_pieces = is_set ? 3 : 1;
    c->out_at = 0;
    c->in_flight++;
}

static void send_some(struct connection *c) {
    for (;;) {
        if (c->out_at == c->out_pieces) {
            if (next_key >= count || c->in_flight >= window) return;
            next_request(c);
        }
        ssize_t n = writev(c->fd, c->out + c->out_at, c->out_pieces - c->out_at);
        if (n < 0) { if (errno == EAGAIN) return; die("writev"); }
        while (c->out_at < c->out_pieces && (size_t)n >= c->out[c->out_at].iov_len)
            n -= c->out[c->out_at++].iov_len;
        if (c->out_at < c->out_pieces) {
            c->out[c->out_at].iov_base = (char *)c->out[c->out_at].iov_base + n;
            c->out[c->out_at].iov_len -= n;
        }
    }
}

static void ended(struct connection *c) {
    c->in_flight--;
    c->first = (c->first + 1) % MOST_IN_FLIGHT;
    done++;
}

static void receive_some(struct connection *c) {
    for (;;) {
        if (c->body_left) {
            long of_value = c->body_left > 2 ? c->body_left - 2 : 0;
            struct iovec in[2] = {
                {slot_of(c->keys[c->first]) + value_bytes - of_value, of_value},
                {trailer, c->body_left - of_value},
            };
            ssize_t n = readv(c->fd, in, 2);
            if (n < 0) { if (errno == EAGAIN) return; die("readv"); }
            if (n == 0) exit(2);
            c->body_left -= n;
            if (!c->body_left) ended(c);
            continue;
        }
        ssize_t n = recv(c->fd, c->head + c->head_used, 1, 0);
        if (n < 0) { if (errno == EAGAIN) return; die("recv"); }
        if (n == 0) exit(2);
        if (c->head[c->head_used++] != '\n') {
            /* "$LENGTH\r" has the same length each time: take the rest of it at once. */
            int rest = (is_set ? 5 : usual) - c->head_used;
            if (rest > 0) {
                n = recv(c->fd, c->head + c->head_used, rest, 0);
                if (n > 0) c->head_used += n;
            }
            if (c->head[c->head_used - 1] != '\n') continue;
        }
        c->head[c->head_used] = 0;
        c->head_used = 0;
        if (is_set) { if (c->head[0] != '+') exit(3); ended(c); }
        else if (atol(c->head + 1) != value_bytes) exit(3);
        else c->body_left = value_bytes + 2;
    }
}

/* One request, one value: what sockets alone can do. */
static int raw_server(void) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1)) die("listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    if (fork() == 0) {
        int fd = accept(listener, NULL, NULL), n, used = 0;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        char *reply = malloc(value_bytes + 64), request[4096];
        long head = sprintf(reply, "$%ld\r\n", value_bytes), all = head + value_bytes + 2;
        memset(reply + head, 'x', value_bytes);
        memcpy(reply + head + value_bytes, "\r\n", 2);
        while ((n = recv(fd, request + used, sizeof request - used, 0)) > 0) {
            int lines = 0;
            for (int i = 0; i < n; i++) lines += request[i] == '*';
            while (lines--)
                for (long sent = 0; sent < all;) sent += send(fd, reply + sent, all - sent, 0);
        }
        _exit(0);
    }
    close(listener);
    return ntohs(address.sin_port);
}

int main(int argc, char **argv) {
    if (argc != 6) return 1;
    int connections = atoi(argv[4]);
    value_bytes = atol(argv[2]);
    is_the_only = connections == 1;
    count = atol(argv[3]);
    window = atoi(argv[5]);
    if (window > MOST_IN_FLIGHT) return 1;
    int port = strcmp(argv[1], "raw") ? atoi(argv[1]) : raw_server();
    usual = snprintf(NULL, 0, "$%ld\r\n", value_bytes);
    slots = malloc(count * value_bytes);
    memset(slots, 'v', count * value_bytes);
    struct connection *all = calloc(connections, sizeof *all);
    struct pollfd *polls = calloc(connections, sizeof *polls);
    for (int i = 0; i < connections; i++) {
        all[i].fd = polls[i].fd = connect_to(port);
    }
    char verb[8];
    while (scanf("%7s", verb) == 1) {
        double start = now(), cpu_start = cpu();
        is_set = !strcmp(verb, "set");
        next_key = done = 0;
        while (done < count) {
            for (int i = 0; i < connections; i++) {
                send_some(&all[i]);
                polls[i].events = POLLIN | (all[i].out_at < all[i].out_pieces ? POLLOUT : 0);
            }
            poll(polls, connections, -1);
            for (int i = 0; i < connections; i++)
                if (polls[i].revents & (POLLIN | POLLHUP)) receive_some(&all[i]);
        }
        printf("%.6f %.6f\n", now() - start, cpu() - cpu_start);
        fflush(stdout);
    }
    return 0;
}
