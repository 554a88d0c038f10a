// The read floor of a top-k: every element once, 16 bytes a load, a running maximum, nothing else.

#include <cuda_runtime.h>

namespace {

__global__ void __launch_bounds__(512) read_all(const float4* data, long long vectors, float* out) {
  float best = -INFINITY;
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < vectors; i += 4 * step) {
    float4 v[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) v[u] = __ldg(data + i + u * step);
#pragma unroll
    for (int u = 0; u < 4; ++u) best = fmaxf(best, fmaxf(fmaxf(v[u].x, v[u].y), fmaxf(v[u].z, v[u].w)));
  }
  for (; i < vectors; i += step) {
    const float4 v = __ldg(data + i);
    best = fmaxf(best, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
  }
  if (best == 1.5e38f) *out = best;  // keeps the reads alive
}

}  // namespace

extern "C" const char* topk_floor_identity() { return TOPK_FLOOR_IDENTITY; }

extern "C" int topk_floor_launch(const void* data, long long vectors, void* out, int blocks, cudaStream_t stream) {
  read_all<<<blocks, 512, 0, stream>>>(static_cast<const float4*>(data), vectors, static_cast<float*>(out));
  return static_cast<int>(cudaPeekAtLastError());
}
