/*
 * A library that is preloaded into a user-mode kernel, so that it runs on processors with AMX.
 *
 * Such a kernel restores the vector registers of its processes with ptrace(PTRACE_SETREGSET, NT_X86_XSTATE), and has room
 * for 2,696 bytes of them. The host accepts the state only in its full size, which is more than 10 KiB where there is
 * AMX, and answers EFAULT otherwise. This adds what is missing, zeroed, and marks it as unused.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define NT_X86_XSTATE 0x202
#define HEADER 512                     /* where the bits are that say which components are in use */
#define KNOWN ((UINT64_C(1) << 10) - 1) /* those that fit: from x87 to protection keys */

static char state[65536] __attribute__((aligned(64)));
static size_t full; /* the size that the host wants */

static long restore(pid_t pid, const struct iovec *given)
{
	struct iovec whole = { state, sizeof(state) };
	uint64_t used;

	if (!full) {
		if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, NT_X86_XSTATE, &whole) < 0)
			return -1;
		full = whole.iov_len;
	}
	if (given->iov_len >= full)
		return syscall(SYS_ptrace, PTRACE_SETREGSET, pid, NT_X86_XSTATE, given);
	memset(state, 0, full);
	memcpy(state, given->iov_base, given->iov_len);
	memcpy(&used, state + HEADER, sizeof(used));
	used &= KNOWN;
	memcpy(state + HEADER, &used, sizeof(used));
	whole.iov_len = full;
	return syscall(SYS_ptrace, PTRACE_SETREGSET, pid, NT_X86_XSTATE, &whole);
}

long ptrace(enum __ptrace_request request, ...)
{
	va_list args;
	va_start(args, request);
	pid_t pid = va_arg(args, pid_t);
	void *addr = va_arg(args, void *);
	void *data = va_arg(args, void *);
	va_end(args);

	if (request == PTRACE_SETREGSET && (uintptr_t)addr == NT_X86_XSTATE)
		return restore(pid, data);
	if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
		/* The system call stores the word where the C library returns it. */
		long word, err = syscall(SYS_ptrace, request, pid, addr, &word);
		return err < 0 ? err : word;
	}
	return syscall(SYS_ptrace, request, pid, addr, data);
}
