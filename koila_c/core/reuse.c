/* SPDX-License-Identifier: Apache-2.0 */
/* reuse.c - make posix_memalign reuse freed blocks, for one library.
 *
 * glibc's posix_memalign looks for `size` bytes and some more, in which an aligned block of `size` lies wherever they
 * start, and frees the rest. A freed block of the same size is too small for that, so it stays a hole, and a loop that
 * allocates the same sizes in each round takes twice the memory that is in use. malloc finds that freed block, and it is
 * aligned already. So malloc is asked first. The library's calls come here since its entry for posix_memalign in the
 * table of addresses that the dynamic linker filled is replaced; what is allocated here is freed by free() as before. */
#define _GNU_SOURCE

#include "reuse.h"

#include <stdlib.h>

#if defined(__GLIBC__) && (defined(__x86_64__) || defined(__aarch64__))
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base.h"

/* Blocks of fewer bytes are as they were: they leave small holes, which other small blocks fill. */
static const size_t LEAST = 1 << 15;
/* glibc maps larger blocks one by one, whatever its options are; a mapped block leaves no hole. */
static const size_t MOST = 1 << 25;
/* The largest alignment that is served here, and the bytes that glibc puts before each block. */
enum { ALIGNMENT = 64, HEADER = sizeof(size_t) };

typedef int Allocate(void **block, size_t alignment, size_t size);

/* posix_memalign, but a freed block of the same size serves again. */
static int
allocate(void **block, size_t alignment, size_t size)
{
    if (alignment > ALIGNMENT || size < LEAST || size >= MOST) {
        return posix_memalign(block, alignment, size);
    }
    /* A block with its header takes a multiple of the alignment: what comes after it is aligned too. */
    size_t taken = (size + HEADER + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT - HEADER;
    void *found = malloc(taken);
    if ((uintptr_t)found % ALIGNMENT == 0 && found != NULL) {
        *block = found;
        return 0;
    }
    free(found);
    return posix_memalign(block, ALIGNMENT, taken);
}

typedef struct {
    const char *library;
    Allocate *from; /* glibc's posix_memalign */
    bool is_done;
} Search;

/* Replace `*slot`. The dynamic linker may have made its page read-only; then it is so again. */
static bool
replace(Allocate **slot, const struct dl_phdr_info *info)
{
    uintptr_t page_size = (uintptr_t)sysconf(_SC_PAGESIZE),
              page = (uintptr_t)slot / page_size * page_size;
    bool is_fixed = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + part->p_vaddr;
        is_fixed |= part->p_type == PT_GNU_RELRO && page >= start && page < start + part->p_memsz;
    }
    if (is_fixed && mprotect((void *)page, page_size, PROT_READ | PROT_WRITE) != 0) {
        return false;
    }
    __atomic_store_n(slot, allocate, __ATOMIC_RELEASE); /* other threads may be calling it */
    return !is_fixed || mprotect((void *)page, page_size, PROT_READ) == 0;
}

/* Replace the entries for posix_memalign in one table of relocations. */
static void
search_table(Search *search, const struct dl_phdr_info *info, const ElfW(Rela) * table,
             size_t n_bytes, const ElfW(Sym) * symbols, const char *names)
{
    for (size_t i = 0; i < n_bytes / sizeof *table; i++) {
        const ElfW(Sym) *symbol = &symbols[ELF64_R_SYM(table[i].r_info)];
        if (strcmp(&names[symbol->st_name], "posix_memalign") != 0) {
            continue;
        }
        Allocate **slot = (Allocate **)(info->dlpi_addr + table[i].r_offset);
        search->is_done |= *slot == allocate || (*slot == search->from && replace(slot, info));
    }
}

static int
search_library(struct dl_phdr_info *info, size_t KL_UNUSED(size), void *given)
{
    Search *search = given;
    const char *slash = strrchr(info->dlpi_name, '/');
    if (slash == NULL || strcmp(slash + 1, search->library) != 0) {
        return 0;
    }
    const ElfW(Dyn) *entry = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) {
            entry = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        }
    }
    const void *of[DT_NUM] = {NULL};
    size_t n_bytes[DT_NUM] = {0};
    for (; entry != NULL && entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag > 0 && entry->d_tag < DT_NUM) {
            of[entry->d_tag] = (const void *)entry->d_un.d_ptr; /* the linker has added the base */
            n_bytes[entry->d_tag] = entry->d_un.d_val;
        }
    }
    if (of[DT_SYMTAB] != NULL && of[DT_STRTAB] != NULL) {
        search_table(search, info, of[DT_JMPREL], n_bytes[DT_PLTRELSZ], of[DT_SYMTAB],
                     of[DT_STRTAB]);
        search_table(search, info, of[DT_RELA], n_bytes[DT_RELASZ], of[DT_SYMTAB], of[DT_STRTAB]);
    }
    return 0;
}

/* Whether glibc has the function that calls of this name come to. */
static bool
is_of_glibc(const char *name)
{
    Dl_info its, of_glibc;
    return dladdr(dlsym(RTLD_DEFAULT, name), &its) != 0 &&
           dladdr(dlsym(RTLD_DEFAULT, "gnu_get_libc_version"), &of_glibc) != 0 &&
           its.dli_fbase == of_glibc.dli_fbase;
}

bool
kl_reuse_freed(const char *library)
{
    /* Another malloc, such as jemalloc's or a sanitizer's, has other rules. */
    if (!is_of_glibc("malloc") || !is_of_glibc("posix_memalign")) {
        return false;
    }
    Search search = {.library = library};
    void *from = dlsym(RTLD_DEFAULT, "posix_memalign");
    memcpy(&search.from, &from, sizeof from); /* ISO C has no cast from an object to a function */
    (void)dl_iterate_phdr(search_library, &search);
    return search.is_done;
}
#else
bool
kl_reuse_freed(const char *library)
{
    (void)library;
    return false;
}
#endif
