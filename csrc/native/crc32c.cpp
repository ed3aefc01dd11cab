#include "crc32c.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define DEADPOOL_SSE42 1
#include <nmmintrin.h>
#endif

namespace deadpool {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;
constexpr std::uint32_t kOne = 0x80000000u;  // the polynomial 1: bit 31 is the coefficient of x^0
constexpr std::size_t kLane = 4096;          // bytes each of three interleaved hardware lanes takes per round
constexpr std::size_t kCopyBlock = 12 * kLane;  // copied, then summed while it is still in the cache

// Product of two polynomials modulo the CRC polynomial, both in reflected bit order.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1u) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// x^(8 * nbytes): appending that many zero bytes multiplies the register by it.
constexpr std::uint32_t zeros(std::uint64_t nbytes) {
  std::uint32_t result = kOne;
  std::uint32_t power = kOne >> 8;  // x^8
  for (; nbytes != 0; nbytes >>= 1) {
    if (nbytes & 1u) result = multiply(result, power);
    power = multiply(power, power);
  }
  return result;
}

using Table8 = std::array<std::array<std::uint32_t, 256>, 8>;
using Table4 = std::array<std::array<std::uint32_t, 256>, 4>;

Table8 slicing_table() {
  Table8 table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1u) ? (crc >> 1) ^ kPolynomial : crc >> 1;
    table[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < 8; ++slice) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t previous = table[slice - 1][byte];
      table[slice][byte] = (previous >> 8) ^ table[0][previous & 0xFFu];
    }
  }
  return table;
}

std::uint32_t portable_register(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
  static const Table8 table = slicing_table();
  while (nbytes >= 8) {
    // Assembled byte by byte: independent of the machine's byte order, and compiled to one load where it can be.
    const std::uint32_t low = crc ^ (static_cast<std::uint32_t>(data[0]) | static_cast<std::uint32_t>(data[1]) << 8 |
                                     static_cast<std::uint32_t>(data[2]) << 16 |
                                     static_cast<std::uint32_t>(data[3]) << 24);
    crc = table[7][low & 0xFFu] ^ table[6][(low >> 8) & 0xFFu] ^ table[5][(low >> 16) & 0xFFu] ^ table[4][low >> 24] ^
          table[3][data[4]] ^ table[2][data[5]] ^ table[1][data[6]] ^ table[0][data[7]];
    data += 8;
    nbytes -= 8;
  }
  while (nbytes-- > 0) crc = (crc >> 8) ^ table[0][(crc ^ *data++) & 0xFFu];
  return crc;
}

#ifdef DEADPOOL_SSE42

Table4 lane_table() {
  const std::uint32_t factor = zeros(kLane);
  Table4 table{};
  for (std::size_t slice = 0; slice < 4; ++slice) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) table[slice][byte] = multiply(factor, byte << (8 * slice));
  }
  return table;
}

std::uint32_t skip_lane(const Table4& table, std::uint32_t crc) {
  return table[0][crc & 0xFFu] ^ table[1][(crc >> 8) & 0xFFu] ^ table[2][(crc >> 16) & 0xFFu] ^ table[3][crc >> 24];
}

std::uint64_t word_at(const unsigned char* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// The instruction has a latency of three cycles and a throughput of one: three independent lanes keep it busy.
__attribute__((target("sse4.2"))) std::uint32_t hardware_register(std::uint32_t crc, const unsigned char* data,
                                                                  std::size_t nbytes) {
  static const Table4 table = lane_table();
  while (nbytes >= 3 * kLane) {
    std::uint64_t a = crc;
    std::uint64_t b = 0;
    std::uint64_t c = 0;
    for (std::size_t at = 0; at < kLane; at += 8) {
      a = _mm_crc32_u64(a, word_at(data + at));
      b = _mm_crc32_u64(b, word_at(data + kLane + at));
      c = _mm_crc32_u64(c, word_at(data + 2 * kLane + at));
    }
    crc = skip_lane(table, static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b);
    crc = skip_lane(table, crc) ^ static_cast<std::uint32_t>(c);
    data += 3 * kLane;
    nbytes -= 3 * kLane;
  }
  std::uint64_t rest = crc;
  for (; nbytes >= 8; data += 8, nbytes -= 8) rest = _mm_crc32_u64(rest, word_at(data));
  crc = static_cast<std::uint32_t>(rest);
  while (nbytes-- > 0) crc = _mm_crc32_u8(crc, *data++);
  return crc;
}

bool has_hardware() {
  static const bool has = __builtin_cpu_supports("sse4.2") != 0;
  return has;
}

#endif

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t init) {
#ifdef DEADPOOL_SSE42
  if (has_hardware()) return ~hardware_register(~init, static_cast<const unsigned char*>(data), nbytes);
#endif
  return crc32c_portable(data, nbytes, init);
}

std::uint32_t crc32c_portable(const void* data, std::size_t nbytes, std::uint32_t init) {
  return ~portable_register(~init, static_cast<const unsigned char*>(data), nbytes);
}

std::uint32_t copy_crc32c(void* destination, const void* source, std::size_t nbytes, std::uint32_t init) {
  auto* to = static_cast<unsigned char*>(destination);
  const auto* from = static_cast<const unsigned char*>(source);
  std::uint32_t crc = init;
  while (nbytes > 0) {
    const std::size_t block = std::min(nbytes, kCopyBlock);
    std::memcpy(to, from, block);
    crc = crc32c(to, block, crc);
    to += block;
    from += block;
    nbytes -= block;
  }
  return crc;
}

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes) {
  return multiply(zeros(second_nbytes), first) ^ second;
}

const char* crc32c_backend() {
#ifdef DEADPOOL_SSE42
  if (has_hardware()) return "sse4.2";
#endif
  return "table";
}

}  // namespace deadpool
