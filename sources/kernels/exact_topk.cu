// Exact, deterministic top-k of the rows of a score matrix, for the sparse-attention indexer.
//
// Contract (each row by itself):
//   window   columns [start, start + m0), m0 = min(max(length, 0), width - start). A start outside [0, width] empties
//            the row. Columns outside the window are never used. The scores are never written.
//   choice   m = min(m0, k) columns by (score descending, column ascending). -0.0 equals +0.0, infinities are
//            ordinary, NaN of any sign and payload ranks below -inf and can be chosen.
//   output   the chosen columns, relative to start, ascending; then -1 up to k. Each column p passes one of three maps:
//            raw p; ragged p + offset[row]; paged table[r][p / page] * page + p % page, or -1 where p lies beyond the
//            table or no table row belongs to the score row.
//
// Why the result cannot depend on scheduling: what a row returns is a function of two numbers, the key T of its k-th
// score and the count above T. Both come from counts over the whole row. Survivor lists are filled in arrival order,
// but only counts and sets are ever read from them, and the order of the output comes from a bitmap over the columns.
// A sample of the row only proposes where to look; counts decide, and a proposal that fails costs one more search,
// never a wrong member. Nothing waits for another block: no spin barrier, no cluster, so no rule on residency.
//
// Nothing is allocated and nothing is read back by the host. Shared memory stays below 99 KB (sm_120).

#include <cstddef>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#ifndef EXACT_TOPK_IDENTITY
#error "build with -DEXACT_TOPK_IDENTITY=\"<sha256 of this file>\""
#endif

// Filled in by the caller in the same order; keep in step with `Arguments` of exact_topk.py.
struct Arguments {
  const void* scores;        // [rows, width], the last dimension contiguous
  const int* lengths;        // [rows]
  const int* starts;         // [rows] or null: 0
  const int* offsets;        // [rows], ragged only
  const int* table;          // [table_rows, table_width], paged only
  const int* segments;       // [segment_count + 1] ascending: rows of table row j; null: row i has table row i
  const int* segment_table;  // [segment_count] or null: table row of each segment
  int* out;                  // [rows, k]
  void* workspace;           // exact_topk_workspace() bytes, 16-byte aligned; need not be initialised
  long long rows;
  long long width;
  long long stride;  // elements between rows of scores; 0 is allowed
  long long table_rows;
  long long table_width;
  long long table_stride;  // elements between rows of the table
  long long workspace_bytes;
  int segment_count;
  int k;
  int page_shift;
  int mode;         // 0 raw, 1 ragged, 2 paged
  int bf16;         // 0: float32
  int path;         // 0: chosen here; 1 resident; 2 stream; 3 split. Paths differ in time only
  int split;        // blocks for each row on path 3; 0: chosen here
  int sample_rank;  // 0: chosen here; else the rank of the pivot in the sample (tests force failing pivots with it)
  int processors;   // multiprocessors of the device
};

namespace {

constexpr int kMaxK = 2048;
constexpr int kBins = 2048;
constexpr int kBinBits = 11;
constexpr int kFew = 128;      // survivors that are ranked by comparing each with each
constexpr int kSurvivors = 8192;  // survivor list; expected need is 2500 to 4500
constexpr int kWindowWords = 15872;  // bitmap words that fit, with padding, into the list's memory
constexpr long long kWindow = 32LL * kWindowWords;
constexpr int kMaxSplit = 64;
constexpr int kResidentKeys = 16;  // keys that a thread holds in registers

static_assert(kWindowWords + kWindowWords / 32 <= 2 * kSurvivors, "the bitmap must fit into the survivor list");
static_assert(kFew < 1024, "three counts of survivors share a word");
static_assert(kMaxK <= kBins, "winners are kept where the bins were");

// ---------------------------------------------------------------------------------------------------------------
// Keys: unsigned integers in the order of the scores. 0 stands for "no element", 1 for NaN.

template <class T>
struct Format;

template <>
struct Format<float> {
  static constexpr int kPerVector = 4;
  static constexpr uint32_t kLowest = 0x007FFFFFu;   // key of -inf
  static constexpr uint32_t kHighest = 0xFF800000u;  // key of +inf
  static constexpr uint32_t kMinusZero = 0x7FFFFFFFu;  // the key that -0.0 would have
  static __device__ __forceinline__ float widen(float x) { return x; }
  static __device__ __forceinline__ float part(const uint4& v, int c) {
    return __uint_as_float(c == 0 ? v.x : c == 1 ? v.y : c == 2 ? v.z : v.w);
  }
  static __device__ __forceinline__ uint32_t key(float x) {
    const uint32_t bits = x == 0.0f ? 0u : __float_as_uint(x);
    const uint32_t ordered = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
    return x != x ? 1u : ordered;
  }
  static __device__ __forceinline__ float value(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
  }
};

template <>
struct Format<__nv_bfloat16> {
  static constexpr int kPerVector = 8;
  static constexpr uint32_t kLowest = 0x007Fu;
  static constexpr uint32_t kHighest = 0xFF80u;
  static constexpr uint32_t kMinusZero = 0x7FFFu;
  static __device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __forceinline__ float part(const uint4& v, int c) {
    const int word = c >> 1;
    const uint32_t pair = word == 0 ? v.x : word == 1 ? v.y : word == 2 ? v.z : v.w;
    return __uint_as_float(c & 1 ? pair & 0xFFFF0000u : pair << 16);
  }
  static __device__ __forceinline__ uint32_t key(float x) {
    const uint32_t wide = Format<float>::key(x);
    return wide == 1u ? 1u : wide >> 16;
  }
  static __device__ __forceinline__ float value(uint32_t key) {
    return Format<float>::value(key << 16 | (key & 0x8000u ? 0u : 0xFFFFu));
  }
};

// ---------------------------------------------------------------------------------------------------------------
// A row.

template <class T>
struct Row {
  const T* first;  // the window's first element
  int length;      // of the window
  int lead;        // elements by which `first` lies behind a 16-byte boundary
  long long number;

  static constexpr int kPer = Format<T>::kPerVector;
  __device__ int vectors() const { return (lead + length + kPer - 1) / kPer; }
  // Calls use(score, column) for the elements of 16-byte vector v that lie in the window.
  template <class F>
  __device__ __forceinline__ void visit(int v, F&& use) const {
    const int column = v * kPer - lead;
    if (column >= 0 && column + kPer <= length) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(first + column));
#pragma unroll
      for (int c = 0; c < kPer; ++c) use(Format<T>::part(raw, c), column + c);
    } else {
#pragma unroll
      for (int c = 0; c < kPer; ++c) {
        if (static_cast<unsigned>(column + c) < static_cast<unsigned>(length))
          use(Format<T>::widen(__ldg(first + column + c)), column + c);
      }
    }
  }
};

template <class T>
__device__ Row<T> row_of(const Arguments& a, long long number) {
  const long long start = a.starts ? a.starts[number] : 0;
  long long length = a.lengths[number];
  const long long room = start < 0 ? 0 : a.width - start;
  length = length < room ? length : room;
  Row<T> row;
  row.length = length < 0 ? 0 : static_cast<int>(length);
  row.first = static_cast<const T*>(a.scores) + number * a.stride + (row.length ? start : 0);
  row.lead = static_cast<int>((reinterpret_cast<uintptr_t>(row.first) & 15u) / sizeof(T));
  row.number = number;
  return row;
}

// Where a chosen column goes.
struct Map {
  const int* table;
  long long pages;
  int shift;
  int mask;
  int offset;
  bool paged;

  __device__ __forceinline__ int operator()(int p) const {
    if (!paged) return p + offset;
    const int page = p >> shift;
    return page < pages ? (__ldg(table + page) << shift) + (p & mask) : -1;
  }
};

__device__ Map map_of(const Arguments& a, long long number) {
  Map map{nullptr, 0, 0, 0, 0, a.mode == 2};
  if (a.mode == 1) map.offset = a.offsets[number];
  if (a.mode != 2) return map;
  long long table_row = number;
  if (a.segments) {
    int low = 0, high = a.segment_count;  // the last segment that begins at or before the row
    while (high - low > 1) {
      const int middle = (low + high) >> 1;
      (a.segments[middle] <= number ? low : high) = middle;
    }
    const bool inside = a.segment_count > 0 && a.segments[low] <= number && number < a.segments[low + 1];
    table_row = !inside ? -1 : a.segment_table ? a.segment_table[low] : low;
  }
  map.shift = a.page_shift;
  map.mask = (1 << a.page_shift) - 1;
  if (table_row >= 0 && table_row < a.table_rows) {
    map.table = a.table + table_row * a.table_stride;
    map.pages = a.table_width;
  }
  return map;
}

// All columns are chosen, in their own order.
template <int kThreads>
__device__ void emit_all(const Arguments& a, long long number, int length) {
  const Map map = map_of(a, number);
  int* out = a.out + number * a.k;
  for (int i = threadIdx.x; i < a.k; i += kThreads) out[i] = i < length ? map(i) : -1;
}

// ---------------------------------------------------------------------------------------------------------------
// The k-th key of a set that the block's threads hold between them.

struct Scratch {
  uint32_t bins[kBins];
  uint32_t few[kFew];
  uint32_t warp[2][32];
  uint32_t box[8];
};

struct Verdict {
  uint32_t key;    // the rank-th largest
  uint32_t above;  // elements with a larger key
  uint32_t equal;  // elements with this key
};

__device__ __forceinline__ uint32_t warp_inclusive(uint32_t v) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, v, d);
    if (lane >= d) v += other;
  }
  return v;
}

// Finds the bin that holds the rank-th element, counted from the top. All threads get it; ends with a barrier.
template <int kThreads>
__device__ void find_bin(Scratch& s, uint32_t rank, uint32_t& bin, uint32_t& above, uint32_t& count) {
  constexpr int kOwn = kBins / kThreads;
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t own[kOwn], sum = 0;
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kOwn;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += own[i] = s.bins[top - i];
  const uint32_t inclusive = warp_inclusive(sum);
  if (lane == 31) s.warp[0][warp] = inclusive;
  __syncthreads();
  const uint32_t sums = warp_inclusive(lane < kWarps ? s.warp[0][lane] : 0u);
  uint32_t before = inclusive - sum;
  if (warp > 0) before += __shfl_sync(0xFFFFFFFFu, sums, warp - 1);
  if (before < rank && rank <= before + sum) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (before < rank && rank <= before + own[i]) {
        s.box[0] = top - i;
        s.box[1] = before;
        s.box[2] = own[i];
      }
      before += own[i];
    }
  }
  __syncthreads();
  bin = s.box[0];
  above = s.box[1];
  count = s.box[2];
}

__device__ __forceinline__ int shift_for(uint32_t span) {
  const int bits = 32 - __clz(span);
  return bits > kBinBits ? bits - kBinBits : 0;
}

// Sorts keys into bins evenly by value. Subtraction and multiplication by a positive number keep the order of values
// under rounding, so bins hold neighbours, and that is all that the choice needs; what a bin holds exactly is counted.
template <class T>
struct Even {
  float low, scale;

  __device__ Even(uint32_t low_key, uint32_t high_key) : low(0), scale(0) {
    if (low_key <= Format<T>::kLowest || high_key >= Format<T>::kHighest || low_key == high_key) return;
    low = Format<T>::value(low_key);
    const float found = (kBins - 1) / (Format<T>::value(high_key) - low);
    scale = found > 0 && found < 1e30f ? found : 0;
  }
  __device__ __forceinline__ bool usable() const { return scale > 0; }
  __device__ __forceinline__ int bin(uint32_t key) const {
    // Adding 2^23 rounds to an integer that stands in the low bits; the difference is never negative nor above 2047.
    return __float_as_uint(__fmaf_rn(Format<T>::value(key) - low, scale, 8388608.0f)) & (2 * kBins - 1);
  }
};

// each(use) must call use(key) for every element that this thread holds; 0 is no element. 1 <= rank <= elements.
// Counting only: with kEven a first round of bins even by value, then at most three of 11 bits below the common prefix,
// fewer once a bin holds few. With `enough` > 0 the caller takes any key for which between rank and enough elements are
// larger or equal, in `key`, and nothing else.
template <class T, int kThreads, bool kEven, class Each>
__device__ Verdict kth(Scratch& s, Each&& each, uint32_t rank, uint32_t enough = 0) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
  uint32_t low = 0xFFFFFFFFu, high = 0;
  each([&](uint32_t key) {
    low = min(low, key - 1u);  // no element wraps to the largest
    high = max(high, key);
  });
  low = __reduce_min_sync(0xFFFFFFFFu, low);
  high = __reduce_max_sync(0xFFFFFFFFu, high);
  if (lane == 0) {
    s.warp[0][warp] = low;
    s.warp[1][warp] = high;
  }
  if (threadIdx.x == 0) s.box[3] = 0;
  __syncthreads();
  low = __reduce_min_sync(0xFFFFFFFFu, lane < kWarps ? s.warp[0][lane] : 0xFFFFFFFFu) + 1u;
  high = __reduce_max_sync(0xFFFFFFFFu, lane < kWarps ? s.warp[1][lane] : 0u);
  Verdict verdict{low, 0, 0};
  uint32_t bin, above, count;
  if (kEven) {
    const Even<T> even(low, high);
    if (even.usable()) {
      each([&](uint32_t key) {
        if (key) atomicAdd(&s.bins[even.bin(key)], 1u);
      });
      __syncthreads();
      find_bin<kThreads>(s, rank, bin, above, count);
      verdict.above += above;
      rank -= above;
      low = 0xFFFFFFFFu;
      high = 0;
      const bool few = count <= kFew;
      each([&](uint32_t key) {
        if (key && even.bin(key) == static_cast<int>(bin)) {
          low = min(low, key);
          high = max(high, key);
          if (few) s.few[atomicAdd(&s.box[3], 1u)] = key;
        }
      });
      if (few) goto compare;
      low = __reduce_min_sync(0xFFFFFFFFu, low);
      high = __reduce_max_sync(0xFFFFFFFFu, high);
      if (lane == 0) {
        s.warp[0][warp] = low;
        s.warp[1][warp] = high;
      }
      for (int i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
      __syncthreads();
      low = __reduce_min_sync(0xFFFFFFFFu, lane < kWarps ? s.warp[0][lane] : 0xFFFFFFFFu);
      high = __reduce_max_sync(0xFFFFFFFFu, lane < kWarps ? s.warp[1][lane] : 0u);
    }
  }
  {
    uint32_t span = high - low;
    while (true) {
      const int shift = shift_for(span);
      each([&](uint32_t key) {
        const uint32_t distance = key - low;
        if (distance <= span) atomicAdd(&s.bins[distance >> shift], 1u);
      });
      __syncthreads();
      find_bin<kThreads>(s, rank, bin, above, count);
      verdict.above += above;
      rank -= above;
      const uint32_t step = bin << shift;
      low += step;
      if (shift == 0 || (enough && verdict.above + count <= enough)) {
        verdict.key = low;
        verdict.equal = count;
        return verdict;
      }
      span = min((1u << shift) - 1u, span - step);
      if (count <= kFew) break;
      for (int i = threadIdx.x; i < kBins; i += kThreads) s.bins[i] = 0;
      __syncthreads();
    }
    each([&](uint32_t key) {
      if (key - low <= span) s.few[atomicAdd(&s.box[3], 1u)] = key;
    });
  }
compare:
  __syncthreads();
  for (uint32_t i = warp; i < count; i += kWarps) {  // a warp compares one with all
    const uint32_t mine = s.few[i];
    uint32_t sum = 0;  // three counts of at most kFew share a word
    for (uint32_t j = lane; j < count; j += 32) {
      const uint32_t other = s.few[j];
      sum += (other > mine ? 1u : 0u) + (other == mine ? (j < i ? 0x100400u : 0x400u) : 0u);
    }
    sum = __reduce_add_sync(0xFFFFFFFFu, sum);
    const uint32_t larger = sum & 0x3FFu, same = sum >> 10 & 0x3FFu, earlier = sum >> 20;
    if (lane == 0 && larger < rank && rank <= larger + same && earlier == 0) {  // exactly one thread
      s.box[4] = mine;
      s.box[5] = larger;
      s.box[6] = same;
    }
  }
  __syncthreads();
  verdict.key = s.box[4];
  verdict.above += s.box[5];
  verdict.equal = s.box[6];
  return verdict;
}

// ---------------------------------------------------------------------------------------------------------------
// Path 1: the whole row in registers.

template <class T, int kThreads, int kKeys>
__global__ void __launch_bounds__(kThreads, kThreads < 1024 ? 3 : 1) resident_rows(const Arguments a) {
  constexpr int kPer = Format<T>::kPerVector;
  constexpr int kVectors = kKeys / kPer;
  constexpr int kWarps = kThreads / 32;
  constexpr int kField = 32 / kVectors;  // bits of a count in a word that holds one for each vector of a thread
  constexpr uint32_t kFieldMask = 0xFFFFFFFFu >> (32 - kField);
  constexpr uint32_t kPart = (1u << kPer) - 1u;
  static_assert(kKeys <= 32 && 32 * kPer <= kFieldMask, "the counts must fit");
  __shared__ Scratch s;
  __shared__ uint32_t totals[2][kWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Row<T> row = row_of<T>(a, blockIdx.x);
  if (row.length <= a.k) {
    emit_all<kThreads>(a, row.number, row.length);
    return;
  }
  uint32_t keys[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) keys[i] = 0;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int v = (warp * kVectors + j) * 32 + lane;  // a warp's part of the row is contiguous
    const int column = v * kPer - row.lead;
    if (column >= 0 && column + kPer <= row.length) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(row.first + column));
#pragma unroll
      for (int c = 0; c < kPer; ++c) keys[j * kPer + c] = Format<T>::key(Format<T>::part(raw, c));
    } else if (column < row.length) {
#pragma unroll
      for (int c = 0; c < kPer; ++c) {
        if (column + c >= 0 && column + c < row.length)
          keys[j * kPer + c] = Format<T>::key(Format<T>::widen(__ldg(row.first + column + c)));
      }
    }
  }
  const Verdict verdict = kth<T, kThreads, true>(
      s,
      [&](auto&& use) {
#pragma unroll
        for (int i = 0; i < kKeys; ++i) use(keys[i]);
      },
      a.k);
  const uint32_t wanted = a.k - verdict.above;  // of the elements equal to the k-th, the first ones

  // For each vector of this thread: how many marked elements of the row stand before it. Columns ascend by warp,
  // vector, lane, part.
  const auto ranks = [&](uint32_t marks, uint32_t* total, uint32_t* before) {
    uint32_t mine = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) mine |= __popc(marks >> (j * kPer) & kPart) << (j * kField & 31);
    const uint32_t inclusive = warp_inclusive(mine);
    const uint32_t all = __shfl_sync(0xFFFFFFFFu, inclusive, 31);
    uint32_t sum = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      before[j] = sum + ((inclusive - mine) >> (j * kField & 31) & kFieldMask);
      sum += all >> (j * kField & 31) & kFieldMask;
    }
    if (lane == 0) total[warp] = sum;
    __syncthreads();
    const uint32_t sums = warp_inclusive(lane < kWarps ? total[lane] : 0u);
    const uint32_t base = warp > 0 ? __shfl_sync(0xFFFFFFFFu, sums, warp - 1) : 0u;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) before[j] += base;
  };
  uint32_t taken = 0, equal = 0, before[kVectors];
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (keys[i] > verdict.key) taken |= 1u << i;
    if (keys[i] == verdict.key) equal |= 1u << i;
  }
  if (verdict.equal > wanted) {
    ranks(equal, totals[0], before);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      uint32_t rank = before[j];
#pragma unroll
      for (int c = 0; c < kPer; ++c) {
        const uint32_t mark = equal & 1u << (j * kPer + c);
        if (mark && rank++ < wanted) taken |= mark;
      }
    }
  } else {
    taken |= equal;
  }
  ranks(taken, totals[1], before);
  uint32_t* winners = s.bins;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    uint32_t place = before[j];
    const int column = ((warp * kVectors + j) * 32 + lane) * kPer - row.lead;
#pragma unroll
    for (int c = 0; c < kPer; ++c) {
      if (taken >> (j * kPer + c) & 1u) winners[place++] = column + c;
    }
  }
  __syncthreads();
  const Map map = map_of(a, row.number);
  int* out = a.out + row.number * a.k;
  for (int i = threadIdx.x; i < a.k; i += kThreads) out[i] = map(static_cast<int>(winners[i]));
}

// ---------------------------------------------------------------------------------------------------------------
// Paths 2 and 3: a pivot from a sample, one pass that keeps what lies above it, an exact choice among those.

struct Stream {
  uint2 list[kSurvivors];  // the score's bits as float32, its column
  Scratch s;
  uint32_t kept;  // elements above the pivot, also those that did not fit
  uint32_t winners;
};

template <class T>
__device__ __forceinline__ uint32_t key_of(const uint2& entry) {
  return Format<T>::key(__uint_as_float(entry.x));
}

__device__ __forceinline__ uint32_t mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// Length > k >= 1. The sampled columns are spread by a fixed hash, so that a period in the scores cannot hide.
template <class T, int kThreads>
__device__ uint32_t propose(const Arguments& a, const Row<T>& row, Stream& m) {
  const int length = row.length;
  const int samples =
      min(length, length >= (1 << 19) ? 8192 : length >= (1 << 18) ? 4096 : length > (1 << 17) ? 2048 : 1024);
  const uint32_t step = static_cast<uint32_t>(length / samples);
  uint32_t* keys = reinterpret_cast<uint32_t*>(m.list);
  for (int i = threadIdx.x; i < samples; i += kThreads) {
    const uint32_t column = static_cast<uint32_t>(i) * step + __umulhi(mix(i), step);
    keys[i] = Format<T>::key(Format<T>::widen(__ldg(row.first + column)));
  }
  const float expected = static_cast<float>(samples) * a.k / length;
  int rank = static_cast<int>(expected + 4.0f * sqrtf(expected)) + 2;
  if (a.sample_rank) rank = a.sample_rank;
  rank = min(rank, samples);
  const Verdict verdict = kth<T, kThreads, false>(
      m.s,
      [&](auto&& use) {
        for (int i = threadIdx.x; i < samples; i += kThreads) use(keys[i]);
      },
      rank, rank + rank / 4 + 4);
  // The key between the zeros belongs to no score and has no value that compares alike; the next lower one lets the
  // same scores pass.
  return verdict.key == Format<T>::kMinusZero ? verdict.key - 1 : verdict.key;
}

// Above by the value of an ordinary score: NaN fails both, zeros of both signs are one.
template <class T>
struct ByValue {
  float pivot;
  __device__ __forceinline__ bool above(float x) const { return x > pivot; }
};

// The same by key, for pivots that are no ordinary score.
template <class T>
struct ByKey {
  uint32_t pivot;
  __device__ __forceinline__ bool above(float x) const { return Format<T>::key(x) > pivot; }
};

// Lists the elements of vectors [from, to) above the pivot, in any order.
// Begins and ends with a barrier. Stops early once the list has overflowed: the caller looks at `kept` first.
template <class T, int kThreads, class Order>
__device__ void keep(const Row<T>& row, int from, int to, const Order& order, Stream& m) {
  constexpr int kPer = Format<T>::kPerVector;
  constexpr int kAhead = 16 / kPer;  // vectors in flight for each thread: 16 elements
  const int lane = threadIdx.x & 31;
  __syncthreads();
  if (threadIdx.x == 0) m.kept = 0;
  __syncthreads();
  // The first and the last vector can stick out of the window: one thread takes their elements one by one.
  const bool ragged_first = from == 0 && row.lead != 0;
  const bool ragged_last = to == row.vectors() && (row.lead + row.length) % kPer != 0;
  const int inner_from = from + (ragged_first ? 1 : 0);
  const int inner_to = to - (ragged_last ? 1 : 0);
  for (int base = inner_from; base < inner_to; base += kThreads * kAhead) {
    uint4 raw[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int v = min(base + u * kThreads + static_cast<int>(threadIdx.x), inner_to - 1);
      raw[u] = __ldg(reinterpret_cast<const uint4*>(row.first + (v * kPer - row.lead)));
    }
    uint32_t hits = 0;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
#pragma unroll
      for (int c = 0; c < kPer; ++c) {
        if (order.above(Format<T>::part(raw[u], c))) hits |= 1u << (u * kPer + c);
      }
    }
    if (base + kThreads * kAhead > inner_to) {  // the last round: what was read twice does not count twice
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const bool there = base + u * kThreads + static_cast<int>(threadIdx.x) < inner_to;
        if (!there) hits &= ~(((1u << kPer) - 1u) << (u * kPer));
      }
    }
    if (!__any_sync(0xFFFFFFFFu, hits)) continue;
    const uint32_t mine = __popc(hits);
    const uint32_t inclusive = warp_inclusive(mine);
    uint32_t place = 0;
    if (lane == 31) place = atomicAdd(&m.kept, inclusive);
    place = __shfl_sync(0xFFFFFFFFu, place, 31);
    if (place > kSurvivors) break;
    place += inclusive - mine;
    for (uint32_t rest = hits; rest && place < kSurvivors; rest &= rest - 1, ++place) {
      // Few elements come here: reading them again is cheaper than finding them among the registers.
      const int at = __ffs(rest) - 1;
      const int column = (base + at / kPer * kThreads + static_cast<int>(threadIdx.x)) * kPer - row.lead + at % kPer;
      const float x = Format<T>::widen(__ldg(row.first + column));
      m.list[place] = uint2{__float_as_uint(x), static_cast<uint32_t>(column)};
    }
  }
  const auto single = [&](float x, int column) {
    if (order.above(x)) {
      const uint32_t place = atomicAdd(&m.kept, 1u);
      if (place < kSurvivors) m.list[place] = uint2{__float_as_uint(x), static_cast<uint32_t>(column)};
    }
  };
  if (threadIdx.x == 0 && from < to && ragged_first) row.visit(from, single);
  if (threadIdx.x == 32 && from < to && ragged_last && !(ragged_first && to - from == 1)) row.visit(to - 1, single);
  __syncthreads();
}

// Asks for a part of the row before its pivot is known, so that the memory works while the sample is judged.
template <class T, int kThreads>
__device__ void fetch(const Row<T>& row, int from, int to) {
  constexpr int kLine = 128 / 16;  // vectors in a line of the cache
  const int last = min(to, from + kLine * kThreads * 4);
  for (int v = from + static_cast<int>(threadIdx.x) * kLine; v < last; v += kThreads * kLine) {
    const T* at = row.first + max(v * Row<T>::kPer - row.lead, 0);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
  }
}

template <class T, int kThreads>
__device__ void keep_above(const Row<T>& row, int from, int to, uint32_t pivot, Stream& m) {
  if (pivot >= Format<T>::kLowest && pivot <= Format<T>::kHighest)
    keep<T, kThreads>(row, from, to, ByValue<T>{Format<T>::value(pivot)}, m);
  else
    keep<T, kThreads>(row, from, to, ByKey<T>{pivot}, m);
}

// Finds, by counting over the whole row, a pivot that is certain to do: at most kSurvivors elements above it, at
// least k above or equal. Reads the row once for every 11 bits, three times at most.
template <class T, int kThreads>
__device__ uint32_t search(const Arguments& a, const Row<T>& row, Stream& m) {
  const int vectors = row.vectors();
  uint32_t low = 1, span = 0xFFFFFFFEu, rank = a.k, above = 0;
  while (true) {
    const int shift = shift_for(span);
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kThreads) m.s.bins[i] = 0;
    __syncthreads();
    for (int v = threadIdx.x; v < vectors; v += kThreads) {
      row.visit(v, [&](float x, int) {
        const uint32_t distance = Format<T>::key(x) - low;
        if (distance <= span) atomicAdd(&m.s.bins[distance >> shift], 1u);
      });
    }
    __syncthreads();
    uint32_t bin, bin_above, count;
    find_bin<kThreads>(m.s, rank, bin, bin_above, count);
    above += bin_above;
    rank -= bin_above;
    const uint32_t step = bin << shift;
    low += step;
    if (shift == 0) return low;
    if (above + count <= kSurvivors) return low - 1;
    span = min((1u << shift) - 1u, span - step);
  }
}

// Adds to the `already` known winners the first `wanted` elements equal to the pivot, by column, as far as there are
// that many, which it tells. Ends with a barrier.
template <class T, int kThreads>
__device__ bool add_equal(const Row<T>& row, uint32_t pivot, uint32_t already, uint32_t wanted, Stream& m,
                          uint32_t* winners) {
  constexpr int kPer = Format<T>::kPerVector;
  constexpr int kWarps = kThreads / 32;
  constexpr int kTile = 4;  // vectors of a lane in a tile; a warp's part of a tile is contiguous
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int vectors = row.vectors();
  uint32_t found = 0;
  for (int base = 0; base < vectors && found < wanted; base += kThreads * kTile) {
    uint32_t hits[kTile], before[kTile], mine = 0;
#pragma unroll
    for (int u = 0; u < kTile; ++u) {
      hits[u] = 0;
      const int v = base + (warp * kTile + u) * 32 + lane;
      if (v < vectors)
        row.visit(v, [&](float x, int column) {
          if (Format<T>::key(x) == pivot) hits[u] |= 1u << (column + row.lead - v * kPer);
        });
      const uint32_t inclusive = warp_inclusive(__popc(hits[u]));
      before[u] = mine + inclusive - __popc(hits[u]);
      mine += __shfl_sync(0xFFFFFFFFu, inclusive, 31);
    }
    __syncthreads();
    if (lane == 0) m.s.warp[0][warp] = mine;
    __syncthreads();
    const uint32_t sums = warp_inclusive(lane < kWarps ? m.s.warp[0][lane] : 0u);
    const uint32_t total = __shfl_sync(0xFFFFFFFFu, sums, 31);
    const uint32_t offset = warp > 0 ? __shfl_sync(0xFFFFFFFFu, sums, warp - 1) : 0u;
#pragma unroll
    for (int u = 0; u < kTile; ++u) {
      const int v = base + (warp * kTile + u) * 32 + lane;
      uint32_t rank = found + offset + before[u];
      for (uint32_t rest = hits[u]; rest && rank < wanted; rest &= rest - 1, ++rank)
        winners[already + rank] = v * kPer - row.lead + __ffs(rest) - 1;
    }
    found += total;
  }
  __syncthreads();
  return found >= wanted;
}

// Words of the bitmap lie one further for every 32, so that threads that own neighbouring words meet no bank twice.
__device__ __forceinline__ int skewed(int word) { return word + (word >> 5); }

// Writes the k winners in ascending order. The list's memory becomes the bitmap.
template <int kThreads>
__device__ void emit_sorted(const Arguments& a, long long number, int length, Stream& m, const uint32_t* winners) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t* bitmap = reinterpret_cast<uint32_t*>(m.list);
  const Map map = map_of(a, number);
  int* out = a.out + number * a.k;
  uint32_t done = 0;
  for (long long window = 0; window < length; window += kWindow) {
    const int columns = static_cast<int>(min(static_cast<long long>(length) - window, kWindow));
    const int words = (columns + 31) / 32;
    const int own = (words + kThreads - 1) / kThreads;
    __syncthreads();
    for (int i = threadIdx.x; i < skewed(words - 1) + 1; i += kThreads) bitmap[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < a.k; i += kThreads) {
      const unsigned place = winners[i] - static_cast<unsigned>(window);
      if (place < static_cast<unsigned>(columns)) atomicOr(&bitmap[skewed(place >> 5)], 1u << (place & 31));
    }
    __syncthreads();
    const int first = threadIdx.x * own, last = min(first + own, words);
    uint32_t mine = 0;
    for (int i = first; i < last; ++i) mine += __popc(bitmap[skewed(i)]);
    const uint32_t inclusive = warp_inclusive(mine);
    if (lane == 31) m.s.warp[0][warp] = inclusive;
    __syncthreads();
    const uint32_t sums = warp_inclusive(lane < kWarps ? m.s.warp[0][lane] : 0u);
    uint32_t place = done + inclusive - mine + (warp > 0 ? __shfl_sync(0xFFFFFFFFu, sums, warp - 1) : 0u);
    done += __shfl_sync(0xFFFFFFFFu, sums, 31);
    for (int i = first; i < last; ++i) {
      for (uint32_t rest = bitmap[skewed(i)]; rest; rest &= rest - 1)
        out[place++] = map(static_cast<int>(window) + i * 32 + __ffs(rest) - 1);
    }
  }
}

// What a block of the filter leaves for its row.
struct Head {
  uint32_t kept, pivot;
};

__device__ __forceinline__ long long head_bytes(long long blocks) {
  return (blocks * static_cast<long long>(sizeof(Head)) + 15) / 16 * 16;
}

template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads) filter_rows(const Arguments a, int split, int room) {
  extern __shared__ __align__(16) unsigned char memory[];
  Stream& m = *reinterpret_cast<Stream*>(memory);
  const long long number = blockIdx.x / split;
  const int part = blockIdx.x % split;
  const Row<T> row = row_of<T>(a, number);
  asm volatile("griddepcontrol.launch_dependents;");  // the finishing kernel may be set up; it waits for this one
  if (row.length <= a.k) return;                       // and needs nothing here
  const int vectors = row.vectors();
  const int share = (vectors + split - 1) / split;
  const int from = min(part * share, vectors), to = min(from + share, vectors);
  fetch<T, kThreads>(row, from, to);
  const uint32_t pivot = propose<T, kThreads>(a, row, m);
  keep_above<T, kThreads>(row, from, to, pivot, m);
  const long long block = blockIdx.x;
  Head* heads = static_cast<Head*>(a.workspace);
  uint2* pairs = reinterpret_cast<uint2*>(static_cast<char*>(a.workspace) + head_bytes(gridDim.x));
  const uint32_t kept = m.kept;
  if (threadIdx.x == 0) heads[block] = Head{kept, pivot};
  if (kept > static_cast<uint32_t>(room)) return;  // the finishing kernel sees an impossible count
  for (uint32_t i = threadIdx.x; i < kept; i += kThreads)
    pairs[block * room + i] = m.list[i];
}

// Collects what the filter's blocks left; m.kept tells when there is too much of it.
template <int kThreads>
__device__ void gather(const Arguments& a, long long number, int split, int room, Stream& m, uint32_t& pivot) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Head* heads = static_cast<const Head*>(a.workspace) + number * split;
  const char* behind_heads = static_cast<const char*>(a.workspace) + head_bytes(a.rows * split);
  const uint2* pairs = reinterpret_cast<const uint2*>(behind_heads) + number * split * static_cast<long long>(room);
  pivot = heads[0].pivot;
  constexpr int kHeads = kMaxSplit / 32;  // for each lane
  uint32_t total = 0, mine[kHeads], before[kHeads];
  bool fits = true;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int at = i * 32 + lane;
    mine[i] = at < split ? heads[at].kept : 0u;
    fits = fits && mine[i] <= static_cast<uint32_t>(room);
    if (!fits) mine[i] = 0;
    const uint32_t inclusive = warp_inclusive(mine[i]);
    before[i] = total + inclusive - mine[i];
    total += __shfl_sync(0xFFFFFFFFu, inclusive, 31);
  }
  fits = __all_sync(0xFFFFFFFFu, fits) && total <= kSurvivors;
  if (fits) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      for (int part = i * 32 + warp; part < min(split, i * 32 + 32); part += kWarps) {
        const uint32_t kept = __shfl_sync(0xFFFFFFFFu, mine[i], part & 31);
        const uint32_t first = __shfl_sync(0xFFFFFFFFu, before[i], part & 31);
        for (uint32_t j = lane; j < kept; j += 32) m.list[first + j] = pairs[static_cast<long long>(part) * room + j];
      }
    }
  }
  if (threadIdx.x == 0) m.kept = fits ? total : kSurvivors + 1u;
  __syncthreads();
}

template <class T, int kThreads, bool kSplit, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) stream_rows(const Arguments a, int split, int room) {
  extern __shared__ __align__(16) unsigned char memory[];
  Stream& m = *reinterpret_cast<Stream*>(memory);
  const Row<T> row = row_of<T>(a, blockIdx.x);
  if (kSplit) asm volatile("griddepcontrol.wait;" ::: "memory");  // until the filter is done and its stores are seen
  if (row.length <= a.k) {
    emit_all<kThreads>(a, row.number, row.length);
    return;
  }
  uint32_t pivot;
  if (kSplit) {
    gather<kThreads>(a, row.number, split, room, m, pivot);
  } else {
    if (kBlocks == 1) fetch<T, kThreads>(row, 0, row.vectors());
    pivot = propose<T, kThreads>(a, row, m);
    keep_above<T, kThreads>(row, 0, row.vectors(), pivot, m);
  }
  const uint32_t k = a.k;
  uint32_t* winners = m.s.bins;
  bool counted = false;  // the pivot comes from counts, not from the sample
  while (true) {
    const uint32_t kept = m.kept;
    if (kept >= k && kept <= kSurvivors) {
      const auto listed = [&](auto&& use) {
        for (uint32_t i = threadIdx.x; i < kept; i += kThreads) use(key_of<T>(m.list[i]));
      };
      const Verdict verdict = kth<T, kThreads, false>(m.s, listed, k);
      const uint32_t wanted = k - verdict.above;
      uint32_t last = 0;  // complement of the last column taken among the equal ones
      if (wanted < verdict.equal) {
        const auto equals = [&](auto&& use) {
          for (uint32_t i = threadIdx.x; i < kept; i += kThreads)
            use(key_of<T>(m.list[i]) == verdict.key ? ~m.list[i].y : 0u);
        };
        last = kth<T, kThreads, false>(m.s, equals, wanted).key;
      }
      if (threadIdx.x == 0) m.winners = 0;
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < kept; i += kThreads) {
        const uint32_t key = key_of<T>(m.list[i]), column = m.list[i].y;
        if (key > verdict.key || (key == verdict.key && ~column >= last)) winners[atomicAdd(&m.winners, 1u)] = column;
      }
      break;
    }
    if (kept < k) {  // the k-th score can be the pivot itself: all that is listed, and the first ones equal to it
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < kept; i += kThreads) winners[i] = m.list[i].y;
      if (add_equal<T, kThreads>(row, pivot, kept, k - kept, m, winners)) break;
    }
    if (counted) __trap();  // counts cannot mislead
    counted = true;         // the sample did: look for a pivot that cannot
    pivot = search<T, kThreads>(a, row, m);
    keep<T, kThreads>(row, 0, row.vectors(), ByKey<T>{pivot}, m);
  }
  emit_sorted<kThreads>(a, row.number, row.length, m, winners);
}

// ---------------------------------------------------------------------------------------------------------------
// Host.

constexpr int kWide = 1024;    // threads where few rows must be fast
constexpr int kNarrow = 512;   // threads where many rows share a multiprocessor

struct Plan {
  int path;
  int threads;
  int split;
  int room;  // survivors that a block of the filter can leave
  long long bytes;
};

int at_least_one(long long v) { return v < 1 ? 1 : static_cast<int>(v); }

// The room that a row can need in registers: one that begins off a 16-byte boundary wastes a part of a vector.
long long widest_of(const Arguments& a) {
  const int per = a.bf16 ? 8 : 4;
  const bool aligned = !a.starts && a.stride % per == 0 && reinterpret_cast<uintptr_t>(a.scores) % 16 == 0;
  return a.width + (aligned ? 0 : per - 1);
}

Plan plan_of(const Arguments& a) {
  Plan p{a.path, kNarrow, 1, 0, 0};
  const int processors = at_least_one(a.processors);
  const long long widest = widest_of(a);
  if (p.path == 0) {
    if (widest <= 1024 * kResidentKeys) p.path = 1;
    else if (a.width <= 49152 || a.rows * 2 > processors) p.path = 2;
    else p.path = 3;
  }
  if (p.path == 1) p.threads = widest <= kNarrow * kResidentKeys && a.rows > processors ? kNarrow : kWide;
  if (p.path == 2) p.threads = a.rows > processors ? kNarrow : kWide;
  if (p.path == 3) {
    p.threads = kWide;
    long long split = a.split ? a.split : processors / (a.rows > 0 ? a.rows : 1); 
    const long long useful = a.width / 4096;
    if (!a.split && split > useful) split = useful;
    p.split = at_least_one(split < kMaxSplit ? split : kMaxSplit);
    p.room = kSurvivors;
    const long long blocks = a.rows * p.split;
    p.bytes = (blocks * static_cast<long long>(sizeof(Head)) + 15) / 16 * 16 + blocks * p.room * 8LL;
  }
  return p;
}

template <class Kernel>
cudaError_t with_memory(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Stream));
}

template <class T>
cudaError_t prepare() {
  cudaError_t error = with_memory(filter_rows<T, kWide>);
  if (error == cudaSuccess) error = with_memory(stream_rows<T, kWide, true, 1>);
  if (error == cudaSuccess) error = with_memory(stream_rows<T, kWide, false, 1>);
  if (error == cudaSuccess) error = with_memory(stream_rows<T, kNarrow, false, 3>);
  return error;
}

template <class T>
cudaError_t launch(const Arguments& a, const Plan& p, cudaStream_t stream) {
  const unsigned rows = static_cast<unsigned>(a.rows);
  if (p.path == 1) {
    if (p.threads == kNarrow) resident_rows<T, kNarrow, 16><<<rows, kNarrow, 0, stream>>>(a);
    else if (widest_of(a) <= kWide * 8) resident_rows<T, kWide, 8><<<rows, kWide, 0, stream>>>(a);
    else resident_rows<T, kWide, 16><<<rows, kWide, 0, stream>>>(a);
  } else if (p.path == 2) {
    if (p.threads == kNarrow) stream_rows<T, kNarrow, false, 3><<<rows, kNarrow, sizeof(Stream), stream>>>(a, 1, 0);
    else stream_rows<T, kWide, false, 1><<<rows, kWide, sizeof(Stream), stream>>>(a, 1, 0);
  } else {
    filter_rows<T, kWide><<<rows * p.split, kWide, sizeof(Stream), stream>>>(a, p.split, p.room);
    const cudaError_t error = cudaPeekAtLastError();
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(rows);
    config.blockDim = dim3(kWide);
    config.dynamicSmemBytes = sizeof(Stream);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, stream_rows<T, kWide, true, 1>, a, p.split, p.room);
  }
  return cudaPeekAtLastError();
}

static_assert(sizeof(Stream) <= 99 * 1024, "sm_120 has 99 KB for a block");

}  // namespace

extern "C" {

// The SHA-256 of this file, as the build was told it.
const char* exact_topk_identity() { return EXACT_TOPK_IDENTITY; }

int exact_topk_argument_bytes() { return static_cast<int>(sizeof(Arguments)); }

// Bytes that the launch with these arguments needs as workspace.
long long exact_topk_workspace(const Arguments* a) { return plan_of(*a).bytes; }

// path * 1000000 + threads * 100 + split: which way these arguments go.
int exact_topk_plan(const Arguments* a) {
  const Plan p = plan_of(*a);
  return p.path * 1000000 + p.threads * 100 + p.split;
}

// Once for each device, before the first launch and outside of any capture.
int exact_topk_prepare() {
  cudaError_t error = prepare<float>();
  if (error == cudaSuccess) error = prepare<__nv_bfloat16>();
  return static_cast<int>(error);
}

// 0, a CUDA error number, or -1 (arguments), -2 (workspace), -3 (the forced path cannot take this width).
int exact_topk_launch(const Arguments* a, cudaStream_t stream) {
  if (a->k < 1 || a->k > kMaxK || a->rows < 0 || a->width < 0 || a->path < 0 || a->path > 3) return -1;
  if (a->rows == 0) return 0;
  const Plan p = plan_of(*a);
  if (a->rows * p.split > 0x7FFFFFFFLL || a->width > 0x7FFFFF00LL) return -1;
  if (p.path == 1 && widest_of(*a) > kWide * kResidentKeys) return -3;
  if (p.bytes > a->workspace_bytes) return -2;
  return static_cast<int>(a->bf16 ? launch<__nv_bfloat16>(*a, p, stream) : launch<float>(*a, p, stream));
}

const char* exact_topk_error(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // extern "C"
