package vm

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	_ "embed"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

//go:embed init.sh
var initScript []byte

// Modules are what the guest loads unless told otherwise: all that a mode of the proxy, SCTP and a network of namespaces
// may ask for. The guest has no modprobe, so nothing comes by itself.
var Modules = strings.Fields(`
	veth bridge br_netfilter dummy sctp overlay
	nf_conntrack nf_conntrack_netlink nf_nat nf_tables nft_ct nft_nat nft_masq nft_redir nft_chain_nat nft_reject
	nft_reject_inet nft_reject_ipv4 nft_reject_ipv6 nft_fib nft_fib_ipv4 nft_fib_ipv6 nft_fib_inet nft_hash nft_numgen nft_limit nft_compat nft_tproxy
	nft_socket nft_log
	ip_tables iptable_nat iptable_filter iptable_mangle iptable_raw ip6_tables ip6table_nat ip6table_filter ip6table_mangle
	ip6table_raw ipt_REJECT ip6t_REJECT xt_conntrack xt_MASQUERADE xt_mark xt_addrtype xt_comment xt_statistic xt_recent
	xt_nat xt_tcpudp xt_multiport xt_TPROXY xt_socket xt_REDIRECT xt_physdev xt_connmark xt_pkttype xt_limit xt_set xt_bpf xt_u32 xt_sctp
	ip_set ip_set_hash_ip ip_set_hash_ipport ip_set_hash_ipportip ip_set_hash_ipportnet ip_set_bitmap_port
	ip_vs ip_vs_rr ip_vs_wrr ip_vs_lc ip_vs_wlc ip_vs_dh ip_vs_sh ip_vs_sed ip_vs_nq ip_vs_mh
	ip_vs_lblc ip_vs_lblcr`)

// initramfs makes the guest's first files: busybox, the modules in the order in which they can be loaded, init. They are
// kept beside the kernel, under a name that tells what they were made of.
func initramfs(kernel, busybox string, modules []string) (string, error) {
	info, err := os.Stat(filepath.Join(kernel, "vmlinuz"))
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%v %v %v %s", info.ModTime(), info.Size(), modules, initScript))
	to := filepath.Join(kernel, fmt.Sprintf("initramfs-%x", sum[:6]))
	if _, err := os.Stat(to); err == nil {
		return to, nil
	}
	order, err := load(filepath.Join(kernel, "modules"), modules)
	if err != nil {
		return "", err
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		return "", err
	}
	a := &archive{}
	for _, dir := range []string{"bin", "modules"} {
		a.add(dir, 0o40755, nil)
	}
	a.add("bin/busybox", 0o100755, program)
	a.add("init", 0o100755, initScript)
	var list bytes.Buffer
	for _, m := range order {
		fmt.Fprintln(&list, m.name)
		a.add("modules/"+m.name, 0o100644, m.content)
	}
	a.add("modules/order", 0o100644, list.Bytes())
	return to, a.write(to)
}

// module is a kernel module, unpacked.
type module struct {
	name    string
	content []byte
}

// load reads modules and all that they depend on, each after its dependencies. What is built into the kernel is left
// out; what is nowhere is an error.
func load(dir string, names []string) ([]module, error) {
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if name, _, ok := strings.Cut(filepath.Base(path), ".ko"); ok {
			files[plain(name)] = path
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	list, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil {
		return nil, err
	}
	for _, path := range strings.Fields(string(list)) {
		files[plain(strings.TrimSuffix(filepath.Base(path), ".ko"))] = ""
	}
	l := &loader{files: files, done: map[string]bool{}}
	for _, name := range names {
		if err := l.load(plain(name)); err != nil {
			return nil, err
		}
	}
	return l.out, nil
}

// plain is a module's name in the form in which names are compared.
func plain(name string) string { return strings.ReplaceAll(name, "-", "_") }

type loader struct {
	files map[string]string // "" for what is built in
	done  map[string]bool
	out   []module
}

func (l *loader) load(name string) error {
	if l.done[name] {
		return nil
	}
	l.done[name] = true
	path, known := l.files[name]
	if !known {
		return fmt.Errorf("the kernel has no module %s", name)
	}
	if path == "" {
		return nil
	}
	content, err := unpack(path)
	if err != nil {
		return err
	}
	depends, err := dependsOn(content)
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	for _, d := range depends {
		if err := l.load(plain(d)); err != nil {
			return err
		}
	}
	l.out = append(l.out, module{name, content})
	return nil
}

func unpack(path string) ([]byte, error) {
	if !strings.HasSuffix(path, ".xz") {
		return os.ReadFile(path)
	}
	out, err := exec.Command("xz", "-dc", path).Output()
	if err != nil {
		return nil, fmt.Errorf("unpack %s: %w", path, err)
	}
	return out, nil
}

// dependsOn reads what a module says about itself.
func dependsOn(content []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("no .modinfo")
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	for _, line := range bytes.Split(info, []byte{0}) {
		if list, ok := strings.CutPrefix(string(line), "depends="); ok {
			return slices.DeleteFunc(strings.Split(list, ","), func(s string) bool { return s == "" }), nil
		}
	}
	return nil, nil
}

// archive is a cpio archive in the form that kernels read ("newc").
type archive struct {
	bytes.Buffer
	inodes int
}

func (a *archive) add(name string, mode uint32, content []byte) {
	a.inodes++
	fmt.Fprintf(a, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		a.inodes, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0)
	a.WriteString(name + "\x00")
	a.pad()
	a.Write(content)
	a.pad()
}

func (a *archive) pad() {
	for a.Len()%4 != 0 {
		a.WriteByte(0)
	}
}

// write ends the archive. The file appears whole or not at all.
func (a *archive) write(to string) error {
	a.add("TRAILER!!!", 0, nil)
	if err := os.WriteFile(to+".new", a.Bytes(), 0o600); err != nil {
		return err
	}
	return os.Rename(to+".new", to)
}
