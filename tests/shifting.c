/* Shifts the tensors that PyTorch allocates on the CPU from their 64-byte boundary, by 0, 8, 24, 40 or 56 bytes in turn.

Sums over the same numbers at another address take other vector tails, so their last bits may differ. Preloaded with
LD_PRELOAD, it reaches every process that is started. Blocks of glibc begin at multiples of 16 bytes: an address with
remainder 8 is a shifted one, and the block's own address is in the 8 bytes before it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static const size_t SHIFTS[] = {8, 0, 24, 56, 0, 40, 8, 56, 24, 0, 40}; /* 11 entries: no loop of calls repeats them */
static atomic_uint turn;

static int is_torch(void *caller) { /* whether it is in libc10; dladdr is slow, so answers are kept, doubled, by caller */
  static atomic_uintptr_t kept[256];
  uintptr_t address = (uintptr_t)caller << 1;
  atomic_uintptr_t *place = &kept[(address >> 1) % 251];
  uintptr_t known = *place;
  if ((known & ~(uintptr_t)1) != address) {
    Dl_info found;
    *place = known = address | (dladdr(caller, &found) && strstr(found.dli_fname, "libc10.so"));
  }
  return known & 1;
}

int posix_memalign(void **result, size_t alignment, size_t size) {
  size_t shift = 0;
  if (alignment == 64 && is_torch(__builtin_return_address(0)))
    shift = SHIFTS[atomic_fetch_add(&turn, 1) % (sizeof SHIFTS / sizeof *SHIFTS)];
  char *block = __libc_memalign(alignment, size + shift);
  if (!block) return ENOMEM;
  *result = block + shift;
  if (shift) memcpy(block + shift - sizeof block, &block, sizeof block);
  return 0;
}

void free(void *given) {
  if (((uintptr_t)given & 15) == 8) memcpy(&given, (char *)given - sizeof given, sizeof given);
  __libc_free(given);
}
