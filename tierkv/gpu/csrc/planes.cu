// Moves blocks between a device's planes and rows of staging memory, or from block to block.
//
// A plane is cut into tiles of at most 4 KiB (a table, made once per set of planes). One warp moves
// one tile of one block at a time, all its loads in flight before its first store; warps stride
// over (tile, block), so any grid is correct. Sizes and offsets are bytes. A row of staging holds
// the bytes [first_byte, ...) of the layout's block; rows lie row_bytes apart. Vectors are as wide
// as the alignment of both ends allows; what a vector does not fill is moved byte by byte, exactly.
//
// Streamed past the L2 cache: through it, a copy engine takes 5.1 instead of 4.8 us for each 256 KiB
// that it then brings from staging to the host (H200, 2026-11-21).
//
// With TAKES_SUMS, gather and scatter also add up each block's checksum (sums.py), of the bytes as
// they pass: a warp adds its tile's part to sums[row], once. tell_sums puts the sums of a whole copy
// where the host reads them, a thread per block.

#define MAX_BLOCKS 960  // ids that fit into the 4 KiB of a kernel's parameters
#define DEPTH 8         // 8 loads x 32 lanes x 16 bytes = one tile in flight per warp

struct Tile {
    unsigned char* first;     // of block 0
    long long stride;         // from a block to the next
    unsigned int block_byte;  // where the tile starts in the layout's block
    unsigned int num_bytes;
};

struct Unit {
    const Tile* tiles;
    unsigned char* staging;
    unsigned int num_tiles;
    unsigned int num_blocks;
    unsigned int row_bytes;
    unsigned int first_byte;
    unsigned long long* sums;  // of the rows
    int block_ids[MAX_BLOCKS];
};

struct Pairs {
    const Tile* tiles;
    unsigned int num_tiles;
    unsigned int num_blocks;
    int source_ids[MAX_BLOCKS / 2];
    int target_ids[MAX_BLOCKS / 2];
};

struct Told {
    const unsigned long long* sums;
    unsigned long long* told;  // in the host's memory
    unsigned int num_blocks;
    int places[MAX_BLOCKS];  // sums[i] to told[places[i]]
};

// A tile's part of the checksum of its block. Bytes are counted within the tile.
#ifdef TAKES_SUMS
struct Sum {
    const unsigned int block_byte;
    unsigned long long low = 0;
    unsigned int high = 0;

    __device__ explicit Sum(const Tile& tile) : block_byte(tile.block_byte) {}

    __device__ __forceinline__ void add(unsigned int word, unsigned int byte) {
        const unsigned int offset = block_byte + byte;
        unsigned int mixed = offset;
        mixed = (mixed ^ (mixed >> 16)) * 0x85ebca6bu;
        mixed = (mixed ^ (mixed >> 13)) * 0xc2b2ae35u;
        mixed ^= mixed >> 16;
        low += static_cast<unsigned long long>(word) * (2 * offset + 1);
        high += word * mixed;
    }
    __device__ __forceinline__ void add(uint2 words, unsigned int byte) {
        add(words.x, byte), add(words.y, byte + 4);
    }
    __device__ __forceinline__ void add(uint4 words, unsigned int byte) {
        add(make_uint2(words.x, words.y), byte), add(make_uint2(words.z, words.w), byte + 8);
    }
    __device__ __forceinline__ void add(unsigned char value, unsigned int byte) {
        add(static_cast<unsigned int>(value) << 8 * (byte & 3), byte & ~3u);
    }
    // By all lanes of the warp together.
    __device__ __forceinline__ void add_to(unsigned long long* sum, unsigned int lane) const {
        unsigned long long part = low + (static_cast<unsigned long long>(high) << 32);
        for (int step = 16; step > 0; step /= 2) part += __shfl_down_sync(~0u, part, step);
        if (lane == 0) atomicAdd(sum, part);
    }
};

#else
struct Sum {
    __device__ explicit Sum(const Tile&) {}
    template <typename Vector>
    __device__ __forceinline__ void add(const Vector&, unsigned int) {}
    __device__ __forceinline__ void add_to(unsigned long long*, unsigned int) const {}
};
#endif

template <typename Vector>
__device__ __forceinline__ void move(
    const unsigned char* source, unsigned char* target, unsigned int num_bytes, unsigned int lane,
    Sum& sum) {
    const Vector* from = reinterpret_cast<const Vector*>(source);
    Vector* to = reinterpret_cast<Vector*>(target);
    const unsigned int count = num_bytes / sizeof(Vector);
    unsigned int at = lane;
    for (; at + 32 * (DEPTH - 1) < count; at += 32 * DEPTH) {
        Vector held[DEPTH];
#pragma unroll
        for (unsigned int k = 0; k < DEPTH; ++k) held[k] = __ldcs(from + at + 32 * k);
#pragma unroll
        for (unsigned int k = 0; k < DEPTH; ++k) __stcs(to + at + 32 * k, held[k]);
#pragma unroll
        for (unsigned int k = 0; k < DEPTH; ++k) sum.add(held[k], (at + 32 * k) * sizeof(Vector));
    }
#pragma unroll 1
    for (; at < count; at += 32) {
        const Vector held = from[at];
        to[at] = held;
        sum.add(held, at * sizeof(Vector));
    }
    const unsigned int rest = count * sizeof(Vector) + lane;
    if (rest < num_bytes) {
        const unsigned char held = source[rest];
        target[rest] = held;
        sum.add(held, rest);
    }
}

__device__ __forceinline__ void move_tile(
    const unsigned char* source, unsigned char* target, unsigned int num_bytes, unsigned int lane,
    Sum& sum) {
    const unsigned long long low =
        reinterpret_cast<unsigned long long>(source) | reinterpret_cast<unsigned long long>(target);
    if ((low & 15) == 0) move<uint4>(source, target, num_bytes, lane, sum);
    else if ((low & 7) == 0) move<uint2>(source, target, num_bytes, lane, sum);
    else if ((low & 3) == 0) move<unsigned int>(source, target, num_bytes, lane, sum);
    else move<unsigned char>(source, target, num_bytes, lane, sum);
}

template <bool TO_PLANES>
__device__ __forceinline__ void move_unit(const Unit& unit) {
    const unsigned int lane = threadIdx.x & 31;
    const unsigned int num_warps = gridDim.x * (blockDim.x >> 5);
    const unsigned int total = unit.num_blocks * unit.num_tiles;
    for (unsigned int at = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); at < total;
         at += num_warps) {
        const unsigned int number = at / unit.num_blocks, row = at - number * unit.num_blocks;
        const Tile tile = unit.tiles[number];
        unsigned char* staged = unit.staging + static_cast<unsigned long long>(row) * unit.row_bytes +
            (tile.block_byte - unit.first_byte);
        unsigned char* plane = tile.first + unit.block_ids[row] * tile.stride;
        Sum sum(tile);
        if (TO_PLANES) move_tile(staged, plane, tile.num_bytes, lane, sum);
        else move_tile(plane, staged, tile.num_bytes, lane, sum);
        sum.add_to(unit.sums + row, lane);
    }
}

extern "C" __global__ void __launch_bounds__(512) gather(const __grid_constant__ Unit unit) {
    move_unit<false>(unit);
}

extern "C" __global__ void __launch_bounds__(512) scatter(const __grid_constant__ Unit unit) {
    move_unit<true>(unit);
}

extern "C" __global__ void __launch_bounds__(512) tell_sums(const __grid_constant__ Told told) {
    const unsigned int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < told.num_blocks) told.told[told.places[at]] = told.sums[at];
}

extern "C" __global__ void __launch_bounds__(512) within(const __grid_constant__ Pairs pairs) {
    const unsigned int lane = threadIdx.x & 31;
    const unsigned int num_warps = gridDim.x * (blockDim.x >> 5);
    const unsigned int total = pairs.num_blocks * pairs.num_tiles;
    for (unsigned int at = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); at < total;
         at += num_warps) {
        const unsigned int row = at / pairs.num_tiles;
        const Tile tile = pairs.tiles[at - row * pairs.num_tiles];
        Sum sum(tile);  // nobody asks for it
        move_tile(tile.first + pairs.source_ids[row] * tile.stride,
                  tile.first + pairs.target_ids[row] * tile.stride, tile.num_bytes, lane, sum);
    }
}
