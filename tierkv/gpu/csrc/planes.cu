// Copies blocks between a device's planes and rows of staging memory, or from block to block.
//
// A plane is divided into tiles of at most 4 KiB; the table of all tiles is made once for each set of
// planes. One warp copies one tile of one block at a time, with up to DEPTH loads of each thread in
// flight before it stores. Warps then go on to further (tile, block) pairs, so a grid of any size is
// correct.
// All sizes and offsets are in bytes. A row of staging memory has the bytes [first_byte, ...) of the
// layout's block; rows are row_bytes apart. Vectors are as wide as the alignment of both ends allows;
// the remaining bytes are copied one by one.
//
// The copied bytes do not stay in the L2 cache (__ldcs, __stcs). If they did, the copy engine would
// take 5.1 instead of 4.8 us for each 256 KiB that it later copies from staging to the host (H200).

#define MAX_BLOCKS 960  // number of ids that fit into the 4 KiB of a kernel's parameters
#define DEPTH 8         // 8 loads x 32 lanes x 16 bytes = one tile in flight per warp

struct Tile {
    unsigned char* first;     // address of block 0's part
    long long stride;         // bytes from one block to the next
    unsigned int block_byte;  // offset of the tile in the layout's block
    unsigned int num_bytes;
};

struct Unit {
    const Tile* tiles;
    unsigned char* staging;
    unsigned int num_tiles;
    unsigned int num_blocks;
    unsigned int row_bytes;
    unsigned int first_byte;
    int block_ids[MAX_BLOCKS];
};

struct Pairs {
    const Tile* tiles;
    unsigned int num_tiles;
    unsigned int num_blocks;
    int source_ids[MAX_BLOCKS / 2];
    int target_ids[MAX_BLOCKS / 2];
};

template <typename Vector>
__device__ __forceinline__ void move(
    const unsigned char* source, unsigned char* target, unsigned int num_bytes,
    unsigned int lane) {
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
    }
#pragma unroll 1
    for (; at < count; at += 32) to[at] = from[at];
    const unsigned int rest = count * sizeof(Vector) + lane;
    if (rest < num_bytes) target[rest] = source[rest];
}

__device__ __forceinline__ void move_tile(
    const unsigned char* source, unsigned char* target, unsigned int num_bytes,
    unsigned int lane) {
    const unsigned long long low =
        reinterpret_cast<unsigned long long>(source) | reinterpret_cast<unsigned long long>(target);
    if ((low & 15) == 0) move<uint4>(source, target, num_bytes, lane);
    else if ((low & 7) == 0) move<uint2>(source, target, num_bytes, lane);
    else if ((low & 3) == 0) move<unsigned int>(source, target, num_bytes, lane);
    else move<unsigned char>(source, target, num_bytes, lane);
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
        if (TO_PLANES) move_tile(staged, plane, tile.num_bytes, lane);
        else move_tile(plane, staged, tile.num_bytes, lane);
    }
}

extern "C" __global__ void __launch_bounds__(512) gather(const __grid_constant__ Unit unit) {
    move_unit<false>(unit);
}

extern "C" __global__ void __launch_bounds__(512) scatter(const __grid_constant__ Unit unit) {
    move_unit<true>(unit);
}

extern "C" __global__ void __launch_bounds__(512) within(const __grid_constant__ Pairs pairs) {
    const unsigned int lane = threadIdx.x & 31;
    const unsigned int num_warps = gridDim.x * (blockDim.x >> 5);
    const unsigned int total = pairs.num_blocks * pairs.num_tiles;
    for (unsigned int at = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); at < total;
         at += num_warps) {
        const unsigned int row = at / pairs.num_tiles;
        const Tile tile = pairs.tiles[at - row * pairs.num_tiles];
        move_tile(tile.first + pairs.source_ids[row] * tile.stride,
                  tile.first + pairs.target_ids[row] * tile.stride, tile.num_bytes, lane);
    }
}
