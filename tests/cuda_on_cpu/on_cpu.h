// What every kernel's source begins with.
#pragma once

#include "entry.h"
#include "ptx_on_cpu.h"
