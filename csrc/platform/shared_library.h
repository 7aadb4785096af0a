// A library that is loaded at run time and may be missing.
#pragma once
#include <dlfcn.h>

#include <initializer_list>

namespace llamac {

// Stays loaded for the life of the process.
struct SharedLibrary {
    void* handle = nullptr;
    explicit SharedLibrary(std::initializer_list<const char*> names) {  // the first that exists
        for (const char* name : names)
            if (!handle) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    template <class F>
    bool find(F*& function, const char* name) const {
        function = handle ? reinterpret_cast<F*>(dlsym(handle, name)) : nullptr;
        return function != nullptr;
    }
};

}  // namespace llamac
