package iptables

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"portal/internal/intent"
)

// Variant is one of the two kernels' mechanisms behind the iptables commands.
type Variant string

const (
	NFT    Variant = "nft"
	Legacy Variant = "legacy"
)

// lockWait is how many seconds a command waits for others that change the tables.
const lockWait = "30"

// tool runs the commands of one family and variant.
type tool struct {
	family  intent.Family
	variant Variant // empty: the machine has one, whichever it is
}

func (t tool) name(what string) string {
	name := "iptables"
	if t.family == intent.IPv6 {
		name = "ip6tables"
	}
	if t.variant != "" {
		name += "-" + string(t.variant)
	}
	return name + what
}

// path finds a command also where PATH lacks the places for administrators.
func path(name string) (string, error) {
	p, err := exec.LookPath(name)
	if err == nil {
		return p, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		if p, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return p, nil
		}
	}
	return "", err
}

func (t tool) present() error {
	for _, what := range []string{"", "-save", "-restore"} {
		if _, err := path(t.name(what)); err != nil {
			return fmt.Errorf("the command %s was not found: install the package iptables", t.name(what))
		}
	}
	return nil
}

// script writes what a command reads.
type script func(*bufio.Writer)

func (t tool) run(ctx context.Context, stdin script, name string, args ...string) ([]byte, error) {
	return t.start(ctx, stdin, name, args...)()
}

// start starts a command, on the caller's thread: its network namespace is meant. What it returns waits for the end.
func (t tool) start(ctx context.Context, stdin script, name string, args ...string) func() ([]byte, error) {
	var out, complaint bytes.Buffer
	p, err := path(name)
	cmd := exec.CommandContext(ctx, p, args...)
	cmd.Stdout, cmd.Stderr = &out, &complaint
	if err == nil {
		err = feed(cmd, stdin)
	}
	return func() ([]byte, error) {
		if err == nil {
			err = cmd.Wait()
		}
		if err != nil {
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			return nil, fmt.Errorf("%s: %w: %s", name, err, firstLine(complaint.String()))
		}
		return out.Bytes(), nil
	}
}

// feed starts a command. What it reads goes there as it is written, so that there is never all of it.
func feed(cmd *exec.Cmd, stdin script) error {
	if stdin == nil {
		return cmd.Start()
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	b := bufio.NewWriterSize(in, 64<<10)
	stdin(b)
	// A command that reads no further says why itself.
	_ = b.Flush()
	_ = in.Close()
	return nil
}

// firstLine is the first that is no warning.
func firstLine(s string) string {
	for line := range strings.Lines(s) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			return line
		}
	}
	return "no reason given"
}

// restore changes the tables: each of them at once or not at all.
func (t tool) restore(ctx context.Context, text script) error {
	if text == nil {
		return nil
	}
	_, err := t.run(ctx, text, t.name("-restore"), "--noflush", "-w", lockWait)
	return err
}

// probeChain is where rules are tried.
const probeChain = "PORTAL-PROBE"

// test says whether the kernel takes some rules, without leaving them there.
func (t tool) test(ctx context.Context, table string, rules ...rule) error {
	err := t.restore(ctx, func(b *bufio.Writer) {
		fmt.Fprintf(b, "*%s\n:%s - [0:0]\n", table, probeChain)
		for _, r := range rules {
			fmt.Fprintf(b, "-A %s %s\n", probeChain, &r)
		}
		b.WriteString("COMMIT\n")
	})
	return errors.Join(err, t.restore(ctx, func(b *bufio.Writer) {
		fmt.Fprintf(b, "*%s\n:%s - [0:0]\n-X %s\nCOMMIT\n", table, probeChain, probeChain)
	}))
}

// found is what a table holds that concerns us.
type found struct {
	chains []string
	jumps  map[string]bool        // by the text of the rule
	rules  map[string]chainDigest // by chain
}

// list reads a table.
func (t tool) list(ctx context.Context, table string) (found, error) { return t.look(ctx, table)() }

// look begins to read a table. What it returns waits for the end.
func (t tool) look(ctx context.Context, table string) func() (found, error) {
	if t.variant == Legacy && !slices.Contains(t.legacyTables(), table) {
		return func() (found, error) { return found{}, nil }
	}
	listed := t.start(ctx, nil, t.name("-save"), "-t", table)
	return func() (found, error) {
		text, err := listed()
		if err != nil {
			return found{}, err
		}
		return find(text)
	}
}

// find looks for what is ours.
func find(text []byte) (found, error) {
	f := found{jumps: map[string]bool{}, rules: map[string]chainDigest{}}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Bytes()
		switch {
		case bytes.HasPrefix(line, []byte(":"+prefix)):
			name, _, _ := strings.Cut(string(line[1:]), " ")
			f.chains = append(f.chains, name)
		case bytes.HasPrefix(line, []byte("-A "+prefix)):
			name, _, _ := bytes.Cut(line[3:], []byte(" "))
			f.rules[string(name)] = f.rules[string(name)].plus(line)
		case bytes.HasPrefix(line, []byte("-A ")) && !bytes.HasPrefix(line, []byte("-A "+prefix)) && bytes.Contains(line, []byte(" -j "+prefix)):
			f.jumps[string(line)] = true
		}
	}
	return f, lines.Err()
}

// legacyTables are those that the kernel has; asking for another would create it.
func (t tool) legacyTables() []string {
	names, _ := os.ReadFile(map[intent.Family]string{
		intent.IPv4: "/proc/thread-self/net/ip_tables_names", intent.IPv6: "/proc/thread-self/net/ip6_tables_names",
	}[t.family])
	return strings.Fields(string(names))
}

// inUse says whether a variant's tables hold any rule, without making the kernel create a table.
func (t tool) inUse(ctx context.Context) (int, error) {
	if t.variant == Legacy && len(t.legacyTables()) == 0 {
		return 0, nil
	}
	if t.variant == NFT {
		if n, err := count(t.family); err == nil {
			return n, nil
		}
	}
	text, err := t.run(ctx, nil, t.name("-save"))
	if err != nil {
		return 0, err
	}
	return bytes.Count(text, []byte("\n-A ")) + bytes.Count(text, []byte("\n:"+prefix)), nil
}

// installed are the variants that the machine has; where the names of commands don't say, the one without a name.
func installed(f intent.Family) (out []Variant) {
	for _, v := range []Variant{NFT, Legacy} {
		if (tool{f, v}).present() == nil {
			out = append(out, v)
		}
	}
	if out == nil && (tool{family: f}).present() == nil {
		out = append(out, "")
	}
	return out
}

// pick finds the variant that this machine uses: the one that has rules already, for rules in both are a mess that
// nobody understands; otherwise the one that the administrator chose for the plain command.
func pick(ctx context.Context, families []intent.Family) (Variant, error) {
	all := installed(families[0])
	switch len(all) {
	case 0:
		return "", (tool{family: families[0]}).present()
	case 1:
		return all[0], nil
	}
	count := map[Variant]int{}
	for _, v := range all {
		for _, f := range families {
			n, err := (tool{f, v}).inUse(ctx)
			if err != nil {
				return "", err
			}
			count[v] += n
		}
	}
	switch {
	case count[Legacy] > count[NFT]:
		return Legacy, nil
	case count[NFT] > 0:
		return NFT, nil
	}
	plain := tool{family: families[0]}
	if version, err := plain.run(ctx, nil, plain.name(""), "--version"); err == nil && bytes.Contains(version, []byte("legacy")) {
		return Legacy, nil
	}
	return NFT, nil
}
