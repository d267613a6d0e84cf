// Reading of rows in pages on CPUs: stored numbers as floats, the places of keys, the keys that queries see.

#pragma once

#include "native_tile.h"

namespace {

template <class T>
inline Ints one_by_one(const T* p) {
  Ints x;
  for (int i = 0; i < LANES; ++i) x[i] = p[i];
  return x;
}

// LANES stored integers, widened. Written out because compilers may not vectorise a conversion (GCC 12 does not).
inline Ints integers(const int8_t* p) {
#if defined(__AVX512F__)
  return bits<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return bits<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return one_by_one(p);
#endif
}
inline Ints integers(const uint8_t* p) {
#if defined(__AVX512F__)
  return bits<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return bits<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return one_by_one(p);
#endif
}
inline Ints integers(const uint16_t* p) {
#if defined(__AVX512F__)
  return bits<Ints>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
  return bits<Ints>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  return one_by_one(p);
#endif
}

// LANES stored numbers as floats.
inline Vec wide(const float* p) { return load(p); }
inline Vec wide(const _Float16* p) {
#if defined(__AVX512F__)
  return bits<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__) && defined(__F16C__)
  return bits<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  Vec x;
  for (int i = 0; i < LANES; ++i) x[i] = p[i];
  return x;
#endif
}
inline Vec wide(const Bf16* p) { return bits<Vec>(integers(&p->raw) << 16); }
inline Vec wide(const int8_t* p) { return __builtin_convertvector(integers(p), Vec); }
inline Vec wide(const Fp8* p) {
  const Ints x = integers(&p->raw), size = x & 0x7f;
  // Numbers below 2^-6 are multiples of 2^-9. XLA's threads flush denormals, so exponents are added instead.
  const Vec small = __builtin_convertvector(size, Vec) * 0.001953125f, normal = bits<Vec>((size << 20) + (120 << 23));
  const Vec y = size == 0x7f ? fill(__builtin_nanf("")) : size < 8 ? small : normal;
  return bits<Vec>(bits<Ints>(y) | (x & 0x80) << 24);
}

// n stored numbers times a factor, padded with zeros to `whole`, a multiple of LANES.
template <class T>
inline void widen(const T* from, int64_t n, int64_t whole, float factor, float* to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, wide(from + i) * factor);
  if (i == whole) return;
  T last[LANES] = {};
  std::copy_n(from + i, n - i, last);
  store(to + i, wide(last) * factor);
}

// A query of a batch, and the keys [first, last) that it sees.
struct Query { int64_t number, first, last; };

// The queries of a batch that see any key, and the keys [begin, end) that any of them sees. A block of a sequence
// that decodes beside prompts has one query, whatever the block's size.
struct Sight {
  std::vector<Query> queries;
  int64_t begin, end, sure_begin, sure_end;  // every one of them sees [sure_begin, sure_end)

  // Takes queries [from, to) of a batch with their positions; keys are [0, most). Calls `blind` for queries that
  // see nothing.
  template <class Blind>
  void look(const int32_t* position, int64_t from, int64_t to, int64_t window, int64_t most, Blind blind) {
    begin = most, end = 0, sure_begin = 0, sure_end = most;
    queries.clear();
    for (int64_t number = from; number < to; ++number) {
      const int64_t after = position[number] + int64_t{1};
      const int64_t first = std::max<int64_t>(0, after - window), last = std::min(after, most);
      if (first >= last) {
        blind(number);
        continue;
      }
      begin = std::min(begin, first), end = std::max(end, last);
      sure_begin = std::max(sure_begin, first), sure_end = std::min(sure_end, last);
      queries.push_back({number, first, last});
    }
  }

  // Which of the keys [start, start + TILE) are seen by any query; returns true if all of them are.
  bool seen(int64_t start, bool* some) const {
    if (sure_begin <= start && start + TILE <= sure_end) return true;
    int change[TILE + 1] = {};  // positions may leave gaps
    for (const Query& query : queries) {
      const int64_t a = std::clamp<int64_t>(query.first - start, 0, TILE);
      const int64_t b = std::clamp<int64_t>(query.last - start, 0, TILE);
      if (a < b) ++change[a], --change[b];
    }
    for (int t = 0, depth = 0; t < TILE; ++t) some[t] = (depth += change[t]) > 0;
    return false;
  }
};

// `f(t, run, page, offset)` for the keys [start + t, start + t + run) of a sequence, which lie in `page` from
// `offset` on; together they are TILE keys.
template <class F>
inline void in_pages(const int32_t* table, int64_t slots, int64_t pages, int64_t page, int64_t start, F f) {
  int64_t slot = start / page, offset = start % page;
  for (int t = 0, run; t < TILE; t += run, ++slot, offset = 0) {
    run = std::min<int64_t>(TILE - t, page - offset);
    f(t, run, std::clamp<int64_t>(table[std::min(slot, slots - 1)], 0, pages - 1), offset);
  }
}

}  // namespace
