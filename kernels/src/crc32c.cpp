// Hardware CRC-32C in three streams (the instruction takes three cycles but starts every cycle),
// tables where there is no instruction.
//
// Streams are joined by shifting a CRC over n zero bytes. In the reflected representation that is a
// multiplication by x^(8n) modulo the polynomial, linear in the CRC, hence four byte tables.
#include "crc32c.hpp"

#include <array>

#include "crc32c_math.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#define KVD_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <sys/auxv.h>
#define KVD_TARGET __attribute__((target("+crc")))
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1UL << 7)
#endif
#endif

namespace kvd {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// table[k][b]: CRC state after byte b and then k zero bytes.
constexpr Tables make_tables() {
  Tables table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = table[k - 1][byte];
      table[k][byte] = (crc >> 8) ^ table[0][crc & 0xFF];
    }
  }
  return table;
}

constexpr Tables kTables = make_tables();

#ifdef KVD_TARGET

using Shift = std::array<std::array<uint32_t, 256>, 4>;

// Tables that move a CRC state over `bytes` zero bytes.
constexpr Shift make_shift(size_t bytes) {
  const uint32_t factor = crc_power(8 * bytes);
  Shift shift{};
  for (uint32_t k = 0; k < 4; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      shift[k][byte] = multiply_crc(byte << (8 * k), factor);
    }
  }
  return shift;
}

constexpr size_t kLong = 4096;  // a page per stream: each has a hardware prefetcher of its own
constexpr size_t kShort = 256;
constexpr Shift kShiftLong = make_shift(kLong);
constexpr Shift kShiftShort = make_shift(kShort);

uint32_t shifted(const Shift& shift, uint32_t crc) {
  return shift[0][crc & 0xFF] ^ shift[1][crc >> 8 & 0xFF] ^ shift[2][crc >> 16 & 0xFF] ^
         shift[3][crc >> 24];
}

#if defined(__x86_64__)
KVD_TARGET inline uint32_t step8(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
KVD_TARGET inline uint32_t step1(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#else
// Written as assembly because <arm_acle.h> declares these only for a whole file built with +crc.
KVD_TARGET inline uint32_t step8(uint32_t crc, uint64_t word) {
  asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
  return crc;
}
KVD_TARGET inline uint32_t step1(uint32_t crc, uint8_t byte) {
  asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(byte));
  return crc;
}
bool has_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

// Consumes as many triples of `run` bytes as there are.
template <size_t run>
KVD_TARGET inline uint32_t three_streams(uint32_t crc, const Shift& shift, const uint8_t*& data,
                                         size_t& bytes) {
  for (; bytes >= 3 * run; data += 3 * run, bytes -= 3 * run) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t at = 0; at < run; at += 8) {
      crc = step8(crc, load64(data + at));
      second = step8(second, load64(data + run + at));
      third = step8(third, load64(data + 2 * run + at));
    }
    crc = shifted(shift, crc) ^ second;
    crc = shifted(shift, crc) ^ third;
  }
  return crc;
}

KVD_TARGET uint32_t crc32c_hardware(uint32_t seed, const uint8_t* data, size_t bytes) {
  uint32_t crc = ~seed;
  crc = three_streams<kLong>(crc, kShiftLong, data, bytes);
  crc = three_streams<kShort>(crc, kShiftShort, data, bytes);
  for (; bytes >= 8; data += 8, bytes -= 8) crc = step8(crc, load64(data));
  for (; bytes > 0; ++data, --bytes) crc = step1(crc, *data);
  return ~crc;
}

#endif  // KVD_TARGET

}  // namespace

uint32_t crc32c_table(uint32_t seed, const uint8_t* data, size_t bytes) {
  uint32_t crc = ~seed;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    const uint64_t word = load64(data) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][word >> (8 * k) & 0xFF];
  }
  for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xFF];
  return ~crc;
}

uint32_t crc32c(uint32_t seed, const uint8_t* data, size_t bytes) {
#ifdef KVD_TARGET
  if (has_instruction()) return crc32c_hardware(seed, data, bytes);
#endif
  return crc32c_table(seed, data, bytes);
}

}  // namespace kvd
