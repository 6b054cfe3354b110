// Package live sends one real packet and watches what the kernel does with it: the rules of nf_tables that it meets, as the kernel's own
// trace has them, and the connection that conntrack makes of it. It says in what that differs from a trace that was only worked out. It
// leaves nothing behind: its table belongs to its socket, and the kernel removes it with that, however the process ends.
package live
