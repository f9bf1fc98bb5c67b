// For any CPU of the architecture.
#define PN_VECTOR_BYTES 16
#define PN_FLOAT64  // for all kinds of CPU: half the passes to compile
#define PN_IMPLEMENTATION baseline
#define PN_NAME "any CPU"
#include "rows_impl.h"
