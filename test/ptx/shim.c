/* The CUDA runtime calls that a host function compiled by CuTe DSL makes, answered without a GPU.
   A launch calls back into Python with its configuration, its kernel's name and its parameters. */

typedef int (*launch_fn)(const void *config, const char *kernel, void **args);
static launch_fn on_launch;

void shim_on_launch(launch_fn function) { on_launch = function; }

int _cudaLaunchKernelEx(const void *config, const void *kernel, void **args) {
    return on_launch ? on_launch(config, (const char *)kernel, args) : 999;
}

/* A kernel's handle is its name: a literal of the host function, which outlives it. */
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = (void *)name; return 0; }
int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    *library = (void *)code;
    return 0;
}
int _cudaLibraryUnload(void *library) { return 0; }

int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int _cudaSetDevice(int device) { return 0; }
/* What is asked for is the shared memory that a block may opt in to: 227 KiB. */
int _cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int _cudaFuncSetAttribute(const void *function, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(const void *function, int attribute, int value, int device) { return 0; }
int _cuKernelGetAttribute(int *value, int attribute, const void *kernel, int device) { *value = 0; return 0; }

/* What CuTe DSL's runtime does at a function's first call: init loads the library, load gets its kernels. Both are
   compiled with the function; their arguments, and where they leave their error, come as an array of pointers. */
int cuda_dialect_init_library_once(void **library, void (*init)(void **), void (*load)(void **), void *set_error) {
    int error = 0, device = 0;
    void *init_arguments[] = {&library, &error}, *load_arguments[] = {&library, &device, &error};
    if (*library) return 0;
    init(init_arguments);
    if (!error) load(load_arguments);
    return error;
}
void cuda_dialect_unload_library_once(void **library) {}
