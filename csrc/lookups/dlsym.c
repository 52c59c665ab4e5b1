/* dlsym, which programs call instead of the C library's.
 *
 * RTLD_DEFAULT and RTLD_NEXT mean the libraries after the one that the return address lies in. So dlsym here is a jump, with
 * the arguments, the stack and the return address as they were, to the C library's function. If the handle names a library,
 * and the symbol is a counted function of the driver, the jump goes to find_counted. Choosing takes no lock and allocates
 * nothing.
 *
 * The linker gives the function its name (setup.py), so that the layers below are not seen to call it: they call dlsym. */
#include <dlfcn.h>
#include <stddef.h>

#include "abi/start.h"
#include "counted.h"
#include "real_dlsym.h"

#if defined(__x86_64__)
__asm__(".text\n"
        ".p2align 4\n"
        ".globl lookups_dlsym\n"
        ".type lookups_dlsym, @function\n"
        "lookups_dlsym:\n"
        ".cfi_startproc\n"
        "endbr64\n"
        "pushq %rdi\n"
        ".cfi_adjust_cfa_offset 8\n"
        "pushq %rsi\n"
        ".cfi_adjust_cfa_offset 8\n"
        "subq $8, %rsp\n" /* the stack is aligned at calls */
        ".cfi_adjust_cfa_offset 8\n"
        "call tms_lookups_choose\n"
        "addq $8, %rsp\n"
        ".cfi_adjust_cfa_offset -8\n"
        "popq %rsi\n"
        ".cfi_adjust_cfa_offset -8\n"
        "popq %rdi\n"
        ".cfi_adjust_cfa_offset -8\n"
        "jmp *%rax\n"
        ".cfi_endproc\n"
        ".size lookups_dlsym, .-lookups_dlsym\n");
#elif defined(__aarch64__)
__asm__(".text\n"
        ".p2align 4\n"
        ".globl lookups_dlsym\n"
        ".type lookups_dlsym, %function\n"
        "lookups_dlsym:\n"
        ".cfi_startproc\n"
        "hint #34\n" /* bti c */
        "stp x29, x30, [sp, #-32]!\n"
        ".cfi_adjust_cfa_offset 32\n"
        ".cfi_rel_offset x29, 0\n"
        ".cfi_rel_offset x30, 8\n"
        "stp x0, x1, [sp, #16]\n"
        "bl tms_lookups_choose\n"
        "mov x16, x0\n"
        "ldp x0, x1, [sp, #16]\n"
        "ldp x29, x30, [sp], #32\n"
        ".cfi_restore x29\n"
        ".cfi_restore x30\n"
        ".cfi_adjust_cfa_offset -32\n"
        "br x16\n"
        ".cfi_endproc\n"
        ".size lookups_dlsym, .-lookups_dlsym\n");
#endif

/* Keeps the real function that the interposer calls, so that the interposer need not look it up while a library is
 * loaded. */
static void keep_device_query(tms_state_t *state, void *handle) {
    void *query = tms_real_dlsym()(handle, "cuCtxGetDevice");
    if (query) (void)tms_hook_keep(state, TMS_HOOK_cuCtxGetDevice, query);
}

/* The result does not depend on the caller, because the handle names a library. */
static void *find_counted(void *handle, const char *symbol) {
    const void *caller = __builtin_return_address(0);
    void *found = tms_real_dlsym()(handle, symbol);
    if (!found) return NULL; /* dlerror then returns the C library's message */
    tms_state_t *state = tms_state(NULL);
    if (!tms_counted_for(state, caller)) return found;
    void *result = tms_counted_replace(state, (tms_hook_t)tms_counted_symbol(symbol), found);
    if (result != found) keep_device_query(state, handle);
    return result;
}

/* Called by the code above. */
__attribute__((visibility("hidden"), used)) tms_dlsym_t tms_lookups_choose(void *handle, const char *symbol);

TMS_LOOKUPS_EARLY tms_dlsym_t tms_lookups_choose(void *handle, const char *symbol) {
    if (handle == RTLD_DEFAULT || handle == RTLD_NEXT || !symbol || tms_counted_symbol(symbol) == TMS_NOT_COUNTED)
        return tms_real_dlsym();
    return find_counted;
}
