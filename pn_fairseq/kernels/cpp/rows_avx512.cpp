// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl, and called on a CPU that has them.
#define PN_VECTOR_BYTES 64
#define PN_IMPLEMENTATION avx512
#define PN_NAME "AVX-512"
#include "rows_impl.h"
