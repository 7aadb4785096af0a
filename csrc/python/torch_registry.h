// core/registry.h beside torch, whose logging has a CHECK of its own.
#pragma once
#include <c10/util/Logging.h>
#undef CHECK

#include "core/registry.h"
