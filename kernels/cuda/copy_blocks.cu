// Copies of KV blocks between the device and pinned host memory, whole blocks of all layers in one launch.
//
// A cache is planes (a layer's keys, a layer's values) of blocks; a block of a plane is contiguous and a multiple of 16
// bytes. The link is slower than one multiprocessor, so a launch has few thread blocks, which take pieces in turn and
// leave the others to the step that runs beside it. Data passes through once: it is not kept in caches.

// Loads in flight per thread.
constexpr int kUnrolled = 8;

extern "C" __global__ void __launch_bounds__(256) copy_blocks(
    const uint4* __restrict__ src, uint4* __restrict__ dst,
    // [2, num_pairs]: blocks read, then blocks written.
    const long long* __restrict__ ids, long long num_pairs, long long num_planes,
    // Sizes in units of 16 bytes.
    long long src_plane, long long dst_plane, long long block) {
    const long long piece = static_cast<long long>(blockDim.x) * kUnrolled;
    const long long pieces_per_block = (block + piece - 1) / piece;
    const long long num_pieces = num_pairs * num_planes * pieces_per_block;
    for (long long i = blockIdx.x; i < num_pieces; i += gridDim.x) {
        const long long within = i % pieces_per_block, pair = i / pieces_per_block % num_pairs;
        const long long plane = i / pieces_per_block / num_pairs;
        const uint4* from = src + plane * src_plane + ids[pair] * block;
        uint4* to = dst + plane * dst_plane + ids[num_pairs + pair] * block;
        const long long first = within * piece + threadIdx.x;
        uint4 held[kUnrolled];
#pragma unroll
        for (int k = 0; k < kUnrolled; k++) {
            const long long at = first + static_cast<long long>(k) * blockDim.x;
            if (at < block) held[k] = __ldcs(from + at);
        }
#pragma unroll
        for (int k = 0; k < kUnrolled; k++) {
            const long long at = first + static_cast<long long>(k) * blockDim.x;
            if (at < block) __stcs(to + at, held[k]);
        }
    }
}
