/* akv.h: the whole public surface of the native engine. The text is in akv.cdef.h, shared with cffi. */
#ifndef AKV_H
#define AKV_H

#include <stdint.h>

#include "../akv.cdef.h"

#endif
