// The kernels of a decoder's pass of one token; see gpu_one_token.py.
// Tensors are bf16, sums float32. No header: NVRTC compiles it as it is.

typedef unsigned short bf16;

constexpr int HIDDEN = 4096, FFN = 14336, HEADS = 32, KV_HEADS = 8, DIM = 128, BLOCK_SIZE = 64;
constexpr int GROUP = HEADS / KV_HEADS;  // query heads of one KV head
constexpr float EPSILON = 1e-5f;         // of the norms
constexpr int MOST_SPLITS = 64;

__device__ inline float wide(unsigned bits) { return __uint_as_float(bits << 16); }

__device__ inline unsigned narrow(float value) {  // to the nearest, ties to even
    const unsigned bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

struct Eight {
    float v[8];
};

__device__ inline Eight unpack(uint4 raw) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
    Eight found;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        found.v[2 * i] = wide(words[i] & 0xffff);
        found.v[2 * i + 1] = wide(words[i] >> 16);
    }
    return found;
}

__device__ inline uint4 packed(const Eight& given) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = narrow(given.v[2 * i]) | narrow(given.v[2 * i + 1]) << 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ inline uint4* vector(bf16* at) { return reinterpret_cast<uint4*>(at); }
__device__ inline const uint4* vector(const bf16* at) { return reinterpret_cast<const uint4*>(at); }

// The embedding of `token`, where the pass begins. One CTA of HIDDEN / 8 threads.
extern "C" __global__ void embed(
    const bf16* embedding, const int* token, bf16* x, unsigned long long* best) {
    const long long at = 8 * threadIdx.x;
    *vector(x + at) = *vector(embedding + (long long)*token * HIDDEN + at);
    if (threadIdx.x == 0) *best = 0;
}

// Products of a matrix's rows of K weights with a vector: two rows to a warp. The first weights are
// on their way while the vector comes to shared memory.
constexpr int GEMV_THREADS = 256;
constexpr int STEP = 8 * 32, DEPTH = 4;  // weights that a warp takes at once of a row; how many such

struct Weights {
    uint4 of[DEPTH][2];
};

__device__ inline Weights weights(const bf16* first, const bf16* second, int at) {
    Weights found;
#pragma unroll
    for (int n = 0; n < DEPTH; ++n) {
        found.of[n][0] = __ldcs(vector(first + at + n * STEP));
        found.of[n][1] = __ldcs(vector(second + at + n * STEP));
    }
    return found;
}

// Sums of two rows, the same for all threads of the warp. norms: the vector is divided by its root
// mean square first.
template <int K, bool norms>
__device__ inline float2 product(const bf16* first, const bf16* second, const bf16* given) {
    __shared__ uint4 shared[K / 8];
    __shared__ float squares[GEMV_THREADS / 32];
    const int thread = threadIdx.x, mine = 8 * (thread % 32);
    Weights now = weights(first, second, mine);
    float square = 0;
    for (int at = thread; at < K / 8; at += GEMV_THREADS) {
        shared[at] = vector(given)[at];
        if (norms) {
            const Eight part = unpack(shared[at]);
            for (int i = 0; i < 8; ++i) square += part.v[i] * part.v[i];
        }
    }
    if (norms) {
        for (int step = 16; step; step /= 2) square += __shfl_xor_sync(~0u, square, step);
        if (thread % 32 == 0) squares[thread / 32] = square;
        __syncthreads();
        square = 0;
        for (int i = 0; i < GEMV_THREADS / 32; ++i) square += squares[i];
        const float scale = rsqrtf(square / K + EPSILON);
        for (int at = thread; at < K / 8; at += GEMV_THREADS) {
            Eight part = unpack(shared[at]);
            for (int i = 0; i < 8; ++i) part.v[i] *= scale;
            shared[at] = packed(part);
        }
    }
    __syncthreads();
    float sums[2] = {};
    for (int start = 0; start < K; start += DEPTH * STEP) {
        const Weights taken = now;
        if (start + DEPTH * STEP < K) now = weights(first, second, start + DEPTH * STEP + mine);
#pragma unroll
        for (int n = 0; n < DEPTH; ++n) {
            const Eight x = unpack(shared[(start + n * STEP + mine) / 8]);
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const Eight w = unpack(taken.of[n][row]);
#pragma unroll
                for (int i = 0; i < 8; ++i) sums[row] += w.v[i] * x.v[i];
            }
        }
    }
    for (int step = 16; step; step /= 2) {
        sums[0] += __shfl_xor_sync(~0u, sums[0], step);
        sums[1] += __shfl_xor_sync(~0u, sums[1], step);
    }
    return make_float2(sums[0], sums[1]);
}

__device__ inline int warp() { return (blockIdx.x * GEMV_THREADS + threadIdx.x) / 32; }
__device__ inline bool is_first_lane() { return threadIdx.x % 32 == 0; }

// qkv = W norm(x).
extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2) project(
    const bf16* matrix, const bf16* x, bf16* qkv) {
    const bf16* row = matrix + 2ll * warp() * HIDDEN;
    const float2 sum = product<HIDDEN, true>(row, row + HIDDEN, x);
    if (is_first_lane()) qkv[2 * warp()] = narrow(sum.x), qkv[2 * warp() + 1] = narrow(sum.y);
}

// x += W given.
template <int K>
__device__ inline void add_product(const bf16* matrix, const bf16* given, bf16* x) {
    const bf16* row = matrix + 2ll * warp() * K;
    const float2 sum = product<K, false>(row, row + K, given);
    if (!is_first_lane()) return;
    bf16* at = x + 2 * warp();
    at[0] = narrow(wide(at[0]) + wide(narrow(sum.x)));
    at[1] = narrow(wide(at[1]) + wide(narrow(sum.y)));
}

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2) add_mixed(
    const bf16* matrix, const bf16* mixed, bf16* x) {
    add_product<HIDDEN>(matrix, mixed, x);
}

extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2) add_gated(
    const bf16* matrix, const bf16* gated, bf16* x) {
    add_product<FFN>(matrix, gated, x);
}

// gated = silu(first half) * second half of W norm(x).
extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2) gate(
    const bf16* matrix, const bf16* x, bf16* gated) {
    const bf16* row = matrix + (long long)warp() * HIDDEN;
    const float2 sum = product<HIDDEN, true>(row, row + (long long)FFN * HIDDEN, x);
    const float gate = wide(narrow(sum.x)), up = wide(narrow(sum.y));
    if (is_first_lane()) gated[warp()] = narrow(gate / (1 + __expf(-gate)) * up);
}

// best = the row with the largest of W norm(x), the first of equals: ~row below, above it a number
// that is in the order of the product.
extern "C" __global__ void __launch_bounds__(GEMV_THREADS, 2) choose(
    const bf16* matrix, const bf16* x, unsigned long long* best) {
    __shared__ unsigned long long of_warp[GEMV_THREADS / 32];
    const bf16* row = matrix + 2ll * warp() * HIDDEN;
    const float2 sum = product<HIDDEN, true>(row, row + HIDDEN, x);
    const float found[2] = {wide(narrow(sum.x)), wide(narrow(sum.y))};
    unsigned long long most = 0;
    for (unsigned n = 0; n < 2; ++n) {
        const unsigned bits = __float_as_uint(found[n]);
        const unsigned ordered = bits >> 31 ? ~bits : bits | 1u << 31;
        const unsigned long long one = (unsigned long long)ordered << 32 | ~(2 * warp() + n);
        most = one > most ? one : most;
    }
    if (is_first_lane()) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < GEMV_THREADS / 32; ++i) most = of_warp[i] > most ? of_warp[i] : most;
    atomicMax(best, most);
}

// Dimensions i and i + DIM / 2 of a head at `position`.
__device__ inline float2 turned(
    const bf16* head, int i, const bf16* cosines, const bf16* sines, int position) {
    const float left = wide(head[i]), right = wide(head[i + DIM / 2]);
    const float c = wide(cosines[position * DIM / 2 + i]), s = wide(sines[position * DIM / 2 + i]);
    return make_float2(left * c - right * s, right * c + left * s);
}

// Writes the K and V of `position` to their block and attends to all up to it, in the blocks of
// `table`. CTA (split, KV head) takes a part of the positions, for the query heads of its KV head;
// the last one to end of a KV head adds up the parts, in their order.
// partial: [KV_HEADS][splits][GROUP][DIM + 2] of sums, maximum, weight. arrived: zeros, per KV head.
constexpr int THREADS = 256, TEAMS = THREADS / 16;  // a team of 16 threads has a position at a time
constexpr int AHEAD = 4;                            // positions whose K and V are on their way
constexpr float LEAST = -1e30f, NEVER = -1e38f;     // of scores; that of a position not there

extern "C" __global__ void __launch_bounds__(THREADS, 2) attend(
    const bf16* qkv, bf16* keys, bf16* values, const int* table, const bf16* cosines,
    const bf16* sines, int position, float* partial, unsigned* arrived, bf16* mixed) {
    __shared__ float queries[GROUP][DIM];
    __shared__ float team_sums[TEAMS][GROUP][DIM];
    __shared__ float team_max[TEAMS][GROUP], team_weight[TEAMS][GROUP];
    __shared__ float of_split[MOST_SPLITS][GROUP];
    __shared__ bool is_last;
    const int splits = gridDim.x, split = blockIdx.x, head = blockIdx.y, thread = threadIdx.x;
    const int each = (position + splits) / splits;
    const int first = split * each, stop = min(first + each, position + 1);

    const int team = thread / 16, mine = 8 * (thread % 16);
    uint4 k[AHEAD], v[AHEAD];
    const auto fetch = [&](int n, int at) {
        k[n] = v[n] = make_uint4(0, 0, 0, 0);
        if (at >= stop) return;
        const long long row = (long long)table[at / BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE;
        k[n] = *vector(keys + (row * KV_HEADS + head) * DIM + mine);
        v[n] = *vector(values + (row * KV_HEADS + head) * DIM + mine);
    };
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) fetch(n, first + team + n * TEAMS);

    {
        const int one = thread / (DIM / 2), i = thread % (DIM / 2);  // GROUP heads of DIM / 2 pairs
        const bf16* query = qkv + (head * GROUP + one) * DIM;
        const float2 pair = turned(query, i, cosines, sines, position);
        const float scale = 1.4426950408889634f * 0.08838834764831845f;  // log2(e) / sqrt(DIM)
        queries[one][i] = pair.x * scale;
        queries[one][i + DIM / 2] = pair.y * scale;
    }
    const bool has_position = first <= position && position < stop;
    if (has_position) {
        const long long row =
            (long long)table[position / BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE;
        const long long at = (row * KV_HEADS + head) * DIM;
        const bf16* key = qkv + (HEADS + head) * DIM;
        const bf16* value = key + KV_HEADS * DIM;
        if (thread < DIM / 2) {
            const float2 pair = turned(key, thread, cosines, sines, position);
            keys[at + thread] = narrow(pair.x);
            keys[at + thread + DIM / 2] = narrow(pair.y);
        } else if (thread < DIM / 2 + DIM) {
            values[at + thread - DIM / 2] = value[thread - DIM / 2];
        }
    }
    __syncthreads();

    float query[GROUP][8], sums[GROUP][8] = {}, most[GROUP], weight[GROUP] = {};
    for (int g = 0; g < GROUP; ++g) {
        most[g] = LEAST;
        for (int i = 0; i < 8; ++i) query[g][i] = queries[g][mine + i];
    }
    for (int start = first + team; start - team < stop; start += AHEAD * TEAMS) {
#pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            const int at = start + n * TEAMS;
            if (start - team > first || at == position) fetch(n, at);  // else it is there already
        }
        float score[AHEAD][GROUP];
#pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            const Eight key = unpack(k[n]);
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                float sum = 0;
#pragma unroll
                for (int i = 0; i < 8; ++i) sum += query[g][i] * key.v[i];
#pragma unroll
                for (int step = 8; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
                score[n][g] = start + n * TEAMS < stop ? sum : NEVER;
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            float higher = most[g];
#pragma unroll
            for (int n = 0; n < AHEAD; ++n) higher = fmaxf(higher, score[n][g]);
            const float kept = exp2f(most[g] - higher);
            most[g] = higher;
            weight[g] *= kept;
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[g][i] *= kept;
        }
#pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            const Eight value = unpack(v[n]);
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                const float share = exp2f(score[n][g] - most[g]);
                weight[g] += share;
#pragma unroll
                for (int i = 0; i < 8; ++i) sums[g][i] += share * value.v[i];
            }
        }
    }
    for (int g = 0; g < GROUP; ++g) {
        for (int i = 0; i < 8; ++i) team_sums[team][g][mine + i] = sums[g][i];
        if (mine == 0) team_max[team][g] = most[g], team_weight[team][g] = weight[g];
    }
    __syncthreads();

    for (int at = thread; at < GROUP * DIM; at += THREADS) {
        const int g = at / DIM, dim = at % DIM;
        float higher = LEAST, sum = 0, all = 0;
        for (int t = 0; t < TEAMS; ++t) higher = fmaxf(higher, team_max[t][g]);
        for (int t = 0; t < TEAMS; ++t) {
            const float kept = exp2f(team_max[t][g] - higher);
            sum += kept * team_sums[t][g][dim];
            all += kept * team_weight[t][g];
        }
        float* part = partial + ((head * splits + split) * GROUP + g) * (DIM + 2);
        part[dim] = sum;
        if (dim == 0) part[DIM] = higher, part[DIM + 1] = all;
    }
    __threadfence();
    __syncthreads();
    if (thread == 0) is_last = atomicInc(&arrived[head], splits - 1) == splits - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();

    const float* parts = partial + head * splits * GROUP * (DIM + 2);
    if (thread < 32 * GROUP) {  // a warp per query head
        const int g = thread / 32, lane = thread % 32;
        float higher = LEAST, all = 0;
        for (int s = lane; s < splits; s += 32)
            higher = fmaxf(higher, __ldcg(parts + (s * GROUP + g) * (DIM + 2) + DIM));
        for (int step = 16; step; step /= 2)
            higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, step));
        for (int s = lane; s < splits; s += 32) {
            const float* part = parts + (s * GROUP + g) * (DIM + 2);
            of_split[s][g] = exp2f(__ldcg(part + DIM) - higher);
            all += of_split[s][g] * __ldcg(part + DIM + 1);
        }
        for (int step = 16; step; step /= 2) all += __shfl_xor_sync(~0u, all, step);
        for (int s = lane; s < splits; s += 32) of_split[s][g] /= all;
    }
    __syncthreads();
    for (int at = thread; at < GROUP * DIM; at += THREADS) {
        const int g = at / DIM, dim = at % DIM;
        float sum = 0;
#pragma unroll 8
        for (int s = 0; s < splits; ++s)
            sum += of_split[s][g] * __ldcg(parts + (s * GROUP + g) * (DIM + 2) + dim);
        mixed[(head * GROUP + g) * DIM + dim] = narrow(sum);
    }
}
