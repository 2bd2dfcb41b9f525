// Numbers of the fake libraries that C++17 has no type for.
#pragma once

#include <cstdint>
#include <cstring>

struct Bfloat16 {
  uint16_t bits;
  Bfloat16& operator=(double value) {
    const float rounded = value;
    uint32_t wide;
    std::memcpy(&wide, &rounded, 4);
    bits = rounded == rounded ? (wide + 0x7fff + (wide >> 16 & 1)) >> 16 : 0x7fc0;
    return *this;
  }
  operator double() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};
