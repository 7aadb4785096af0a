// Operations and their calls beside torch, whose logging has a CHECK of its own.
#pragma once
#include <c10/util/Logging.h>
#undef CHECK

#include "core/dispatch.h"
#include "core/registry.h"
