package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"portal/internal/apiserver"
	"portal/internal/audit"
	"portal/internal/store"
)

// storageOptions are the flags of `portal storage`: which storage, and how to print.
type storageOptions struct {
	kubeconfig string
	dataDir    string
	etcd       store.Options
	encryption string
	output     string
}

func newStorageCommand() *cobra.Command {
	o := storageOptions{etcd: store.DefaultOptions()}
	cmd := &cobra.Command{
		Use:   "storage",
		Short: "Look after etcd: its status, defragmentation, encryption, snapshots and restoring them",
		Long: `Look after the storage of a server. Without --kubeconfig or --etcd-servers it is that of $KUBECONFIG, or of this machine's server: through the
server if it runs, otherwise from its data directory.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return usageError{fmt.Errorf("storage has no command %q: it has status, defrag, reencrypt, snapshot and restore", args[0])}
		},
	}
	f := cmd.PersistentFlags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "ask the running server of this kubeconfig")
	f.StringVar(&o.dataDir, "data-dir", "", "the server's data directory (default: that of $KUBECONFIG or $"+dataDirVariable+", or that of this machine's server)")
	f.StringSliceVar(&o.etcd.Servers, "etcd-servers", nil, "URLs of an etcd cluster, as given to the server")
	f.StringVar(&o.etcd.CAFile, "etcd-cafile", "", "authority of the etcd cluster's certificates")
	f.StringVar(&o.etcd.CertFile, "etcd-certfile", "", "certificate to show to the etcd cluster")
	f.StringVar(&o.etcd.KeyFile, "etcd-keyfile", "", "its key")
	f.Int64Var(&o.etcd.QuotaBytes, "etcd-quota-bytes", o.etcd.QuotaBytes, "quota of a storage whose server does not run, as given to the server")
	f.StringVar(&o.encryption, "encryption-provider-config", "",
		"the server's file of encryption keys, for a storage whose server does not run, or with --etcd-servers")
	outputFlag(f, &o.output)
	cmd.AddCommand(
		o.command("status", "How large it is, its quota, what is encrypted with which key, and whether it accepts writes (exit status 1 if not)", noArgs, o.status),
		o.command("defrag", "Drop old revisions, give free space back, and end etcd's NOSPACE alarm if there is room", noArgs, o.defrag),
		o.reencryptCommand(),
		o.command("snapshot FILE", "Write a checked copy of everything stored to FILE, readable by its owner only", oneFile, o.snapshot),
		o.restoreCommand(),
	)
	return cmd
}

func (o *storageOptions) command(use, short string, args cobra.PositionalArgs,
	run func(ctx context.Context, out io.Writer, args []string) error,
) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: args, RunE: func(cmd *cobra.Command, args []string) error {
		if err := o.validate(); err != nil {
			return usageError{err}
		}
		return run(cmd.Context(), cmd.OutOrStdout(), args)
	}}
}

func oneFile(cmd *cobra.Command, args []string) error {
	if len(args) != 1 || args[0] == "" {
		return usageError{fmt.Errorf("%s takes one argument, the snapshot's file name", cmd.CommandPath())}
	}
	return nil
}

func (o *storageOptions) validate() error {
	given := 0
	for _, set := range []bool{o.kubeconfig != "", o.dataDir != "", len(o.etcd.Servers) > 0} {
		if set {
			given++
		}
	}
	switch {
	case given > 1:
		return errors.New("--kubeconfig, --data-dir and --etcd-servers: give one of them")
	case o.kubeconfig != "" && o.encryption != "":
		return errors.New("--encryption-provider-config: is the server's own when it is asked by --kubeconfig")
	case o.output != "" && o.output != "json":
		return fmt.Errorf("--output %q: must be json, or left out", o.output)
	case (o.etcd.CertFile == "") != (o.etcd.KeyFile == ""):
		return errors.New("--etcd-certfile and --etcd-keyfile: one needs the other")
	case len(o.etcd.Servers) == 0 && (o.etcd.CAFile != "" || o.etcd.CertFile != ""):
		return errors.New("--etcd-cafile, --etcd-certfile and --etcd-keyfile: are for --etcd-servers, which is not given")
	}
	for _, server := range o.etcd.Servers {
		if !strings.HasPrefix(server, "http://") && !strings.HasPrefix(server, "https://") {
			return fmt.Errorf("--etcd-servers %q: must be a URL, e.g. https://10.0.0.1:2379", server)
		}
	}
	return nil
}

// localDataDir is the data directory that the flags or the environment name, or the first usual one with something in it.
func (o *storageOptions) localDataDir() string {
	if o.dataDir != "" {
		return o.dataDir
	}
	if dir := kubeconfigDataDir(); dir != "" {
		return dir
	}
	return usualDataDir()
}

// kubeconfigDataDir is the data directory whose administrator's kubeconfig $KUBECONFIG names; "" if it names none, or another server's.
func kubeconfigDataDir() string {
	dir, name := filepath.Split(os.Getenv("KUBECONFIG"))
	if name != adminKubeconfig {
		return ""
	}
	if _, err := os.Stat(filepath.Join(dir, "pki")); err != nil {
		return ""
	}
	return dir
}

func etcdDir(dataDir string) string { return filepath.Join(dataDir, "etcd") }

// keeper is a storage that can be looked after: one opened here, or that of a running server.
type keeper interface {
	Status(ctx context.Context) (store.Status, error)
	Defragment(ctx context.Context) (store.Status, error)
	Reencrypt(ctx context.Context, tell func(store.Reencryption)) (store.Reencryption, error)
	Snapshot(ctx context.Context, to io.Writer) error
	Close()
}

// open finds the storage that the flags mean.
func (o *storageOptions) open(ctx context.Context) (keeper, error) {
	if o.kubeconfig != "" {
		return askServer(o.kubeconfig)
	}
	if len(o.etcd.Servers) > 0 {
		return apiserver.OpenStorage(ctx, o.etcd, o.encryption)
	}
	if o.dataDir == "" && os.Getenv("KUBECONFIG") != "" && kubeconfigDataDir() == "" {
		return askServer("")
	}
	dir := o.localDataDir()
	kubeconfig := filepath.Join(dir, adminKubeconfig)
	if _, err := os.Stat(etcdDir(dir)); err != nil {
		if readable(kubeconfig) { // a server with an external etcd
			return askServer(kubeconfig)
		}
		return nil, fmt.Errorf("there is no storage in %s: give --data-dir, --kubeconfig or --etcd-servers", dir)
	}
	opts := o.etcd
	opts.Dir = etcdDir(dir)
	attached, err := apiserver.OpenStorage(ctx, opts, o.encryption)
	if errors.Is(err, store.ErrInUse) {
		return askServer(kubeconfig)
	}
	if err != nil {
		return nil, err
	}
	return attached, nil
}

func (o *storageOptions) status(ctx context.Context, out io.Writer, _ []string) error {
	return o.ask(ctx, out, keeper.Status)
}

func (o *storageOptions) defrag(ctx context.Context, out io.Writer, _ []string) error {
	return o.ask(ctx, out, keeper.Defragment)
}

// ask does something that ends in a status, and prints that.
func (o *storageOptions) ask(ctx context.Context, out io.Writer, do func(keeper, context.Context) (store.Status, error)) error {
	k, err := o.open(ctx)
	if err != nil {
		return err
	}
	defer k.Close()
	status, err := do(k, ctx)
	if err != nil {
		return err
	}
	if o.output == "json" {
		err = printJSON(out, status)
	} else {
		err = printStorage(out, status)
	}
	if err == nil && status.WritesRefused != "" {
		err = fmt.Errorf("the storage refuses writes: %s", status.WritesRefused)
	}
	return err
}

func (o *storageOptions) snapshot(ctx context.Context, out io.Writer, args []string) error {
	k, err := o.open(ctx)
	if err != nil {
		return err
	}
	defer k.Close()
	info, err := store.SaveSnapshot(args[0], func(to io.Writer) error { return k.Snapshot(ctx, to) })
	if err != nil {
		return err
	}
	if o.output == "json" {
		return printJSON(out, info)
	}
	_, err = fmt.Fprintf(out, "%s: %s, %d keys at revision %d; checked\n", info.File, size(info.SizeBytes), info.Keys, info.Revision)
	return err
}

func size(n int64) string { return humanize.IBytes(uint64(max(n, 0))) }

func printStorage(out io.Writer, status store.Status) error {
	fmt.Fprintf(out, "%s etcd, %d keys at revision %d\n\n", status.Mode, status.Keys, status.Revision)
	table := newTable(out)
	fmt.Fprintln(table, "ENDPOINT\tVERSION\tSIZE\tIN USE\tQUOTA\tLEADER\tALARMS")
	for _, m := range status.Members {
		if m.Error != "" {
			fmt.Fprintf(table, "%s\t-\t-\t-\t-\t-\t%s\n", m.Endpoint, m.Error)
			continue
		}
		quota := "-"
		if m.QuotaBytes > 0 {
			quota = size(m.QuotaBytes)
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%v\t%s\n", m.Endpoint, m.Version, size(m.SizeBytes), size(m.InUseBytes), quota,
			m.Leader, orDash(strings.Join(m.Alarms, ",")))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	return printEncryption(out, status.Encryption)
}

// restored is what `portal storage restore -o json` prints.
type restored struct {
	store.SnapshotInfo
	Dir   string        `json:"dir"`
	Audit *audit.Report `json:"audit,omitempty"`
}
