// Compiled with -mavx2 -mfma -mf16c, and called on a CPU that has them.
#define PN_VECTOR_BYTES 32
#define PN_IMPLEMENTATION avx2
#define PN_NAME "AVX2"
#include "rows_impl.h"
