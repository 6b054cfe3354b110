package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
	kubeversion "k8s.io/component-base/version"

	"portal/internal/node"
	"portal/internal/node/image"
)

// imageStoreOptions are the flags that `portal node` and `portal image` share.
type imageStoreOptions struct {
	insecure []string
	maxSize  string
}

func (o *imageStoreOptions) addFlags(f *pflag.FlagSet) {
	f.StringSliceVar(&o.insecure, "insecure-registry", nil, "registries (host or host:port) that may be reached without encryption; those of this machine may anyway")
	f.StringVar(&o.maxSize, "image-max-size", "32Gi", "the most that an image may take when it is unpacked")
}

// apply checks the flags.
func (o *imageStoreOptions) apply(out *image.Options) error {
	for _, r := range o.insecure {
		if r == "" || strings.ContainsAny(r, "/ ") {
			return fmt.Errorf("--insecure-registry: %q must be a host or host:port", r)
		}
	}
	q, err := resource.ParseQuantity(o.maxSize)
	if err != nil || q.Value() < 1<<20 || q.Value() > math.MaxInt64/4 {
		return fmt.Errorf("--image-max-size: %q must be a size such as 32Gi, and 1Mi at least", o.maxSize)
	}
	out.Insecure, out.MaxSize = o.insecure, q.Value()
	out.UserAgent = "portal/" + kubeversion.Get().GitVersion
	return nil
}

// imageOptions are the flags of `portal image`.
type imageOptions struct {
	dataDir, output, authFile, name string
	store                           imageStoreOptions
}

func newImageCommand() *cobra.Command {
	o := imageOptions{}
	cmd := &cobra.Command{
		Use:   "image",
		Short: "Pull, load, list and remove the images of this machine's Pods",
		Long: "Works on the data directory of `portal node`, whether that runs or not.\n" +
			"Images that are pulled are removed when the disk is full and no container has them; those that are loaded from an archive stay.",
		Args: subcommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.PersistentFlags().StringVar(&o.dataDir, "data-dir", "", "data directory of portal node (default: "+defaultNodeDir()+")")
	one := func(what string) cobra.PositionalArgs {
		return func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{fmt.Errorf("%s takes one argument: %s", cmd.CommandPath(), what)}
			}
			return nil
		}
	}
	pull := &cobra.Command{
		Use: "pull REF", Short: "Pull an image from its registry", Args: one("an image, such as registry.example/team/web:1.2"),
		RunE: o.run(o.pull),
	}
	pull.Flags().StringVar(&o.authFile, "auth-file", "", "file with credentials for registries, as docker login writes it (config.json)")
	load := &cobra.Command{
		Use: "load FILE", Short: "Load the images of an archive: an OCI layout in tar, or what docker save writes; - is the standard input", Args: one("a file, or -"),
		RunE: o.run(o.load),
	}
	load.Flags().StringVar(&o.name, "name", "", "what the archive's only image is called, instead of what the archive says")
	for _, c := range []*cobra.Command{pull, load} {
		o.store.addFlags(c.Flags())
	}
	list := &cobra.Command{Use: "ls", Short: "The images that are here", Args: noArgs, RunE: o.run(o.list)}
	for _, c := range []*cobra.Command{pull, load, list} {
		outputFlag(c.Flags(), &o.output)
	}
	cmd.AddCommand(pull, load, list,
		&cobra.Command{Use: "rm REF", Short: "Remove an image, by its name, its ID or the beginning of its ID", Args: one("an image"), RunE: o.run(o.remove)},
		&cobra.Command{Use: "prune", Short: "Remove all images that no container has and that were not loaded from an archive", Args: noArgs, RunE: o.run(o.prune)},
	)
	return cmd
}

func (o *imageOptions) run(do func(context.Context, *cobra.Command, *image.Store, []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		if err := checkOutput(o.output); err != nil {
			return err
		}
		if o.dataDir == "" {
			o.dataDir = defaultNodeDir()
		}
		dir, err := filepath.Abs(o.dataDir)
		if err != nil {
			return usageError{fmt.Errorf("--data-dir: %w", err)}
		}
		options := node.ImageOptions(dir)
		if cmd.Flags().Lookup("image-max-size") != nil {
			if err := o.store.apply(&options); err != nil {
				return usageError{err}
			}
		}
		if os.Geteuid() != 0 {
			return errors.New("run this as root: images have files of all users")
		}
		return do(cmd.Context(), cmd, image.NewStore(options), args)
	}
}

// progress prints a line for each layer, for people.
func progress(w io.Writer) func(image.Progress) {
	return func(p image.Progress) {
		switch {
		case p.Here:
			fmt.Fprintf(w, "layer %d of %d: is here\n", p.Layer, p.Layers)
		case p.Done:
			fmt.Fprintf(w, "layer %d of %d: unpacked, %s read\n", p.Layer, p.Layers, humanize.IBytes(uint64(max(p.Read, 0))))
		}
	}
}

func (o *imageOptions) pull(ctx context.Context, cmd *cobra.Command, store *image.Store, args []string) error {
	if store.Local(args[0]) {
		return usageError{fmt.Errorf("image %q is the machine's own root: there is nothing to pull", args[0])}
	}
	var credentials image.Credentials
	if o.authFile != "" {
		data, err := os.ReadFile(o.authFile)
		if err != nil {
			return usageError{fmt.Errorf("--auth-file: %w", err)}
		}
		if credentials, err = image.ParseCredentials(data, false); err != nil {
			return usageError{fmt.Errorf("--auth-file %s: %w", o.authFile, err)}
		}
	}
	record, err := store.Pull(ctx, args[0], credentials, progress(cmd.ErrOrStderr()))
	var invalid *image.InvalidNameError
	if errors.As(err, &invalid) {
		return usageError{err}
	}
	if err != nil {
		return err
	}
	return o.print(cmd, []*image.Record{record})
}

func (o *imageOptions) load(ctx context.Context, cmd *cobra.Command, store *image.Store, args []string) error {
	in := cmd.InOrStdin()
	if args[0] != "-" {
		f, err := os.Open(args[0])
		if err != nil {
			return usageError{err}
		}
		defer f.Close()
		in = f
	}
	list, err := store.Load(ctx, in, o.name, progress(cmd.ErrOrStderr()))
	if err != nil {
		return fmt.Errorf("%s: %w", args[0], err)
	}
	return o.print(cmd, list)
}

// print shows images that have just come.
func (o *imageOptions) print(cmd *cobra.Command, list []*image.Record) error {
	for _, r := range list {
		if len(r.Config.Volumes) > 0 {
			fmt.Fprintf(cmd.ErrOrStderr(), "%s: its VOLUMEs (%s) get no volume of their own: what is written there ends with the container, unless the Pod mounts one\n",
				r.Title(), strings.Join(r.Config.Volumes, ", "))
		}
	}
	if o.output == "json" {
		return printJSON(cmd.OutOrStdout(), list)
	}
	for _, r := range list {
		fmt.Fprintf(cmd.OutOrStdout(), "%s %s\n", r.Title(), r.ID)
	}
	return nil
}

func (o *imageOptions) list(_ context.Context, cmd *cobra.Command, store *image.Store, _ []string) error {
	list, err := store.List()
	if err != nil {
		return err
	}
	if o.output == "json" {
		if list == nil {
			list = []*image.Record{}
		}
		return printJSON(cmd.OutOrStdout(), list)
	}
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 8, 3, ' ', 0)
	fmt.Fprintln(w, "IMAGE\tID\tSIZE\tUSED\tKEPT")
	for _, r := range list {
		kept := "until the disk is full"
		if r.Pinned {
			kept = "loaded: until it is removed"
		}
		names := r.Names
		if len(names) == 0 {
			names = []string{r.Title()}
		}
		for _, n := range names {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", n, strings.TrimPrefix(r.ID, "sha256:")[:12], humanize.IBytes(uint64(r.Size)), humanize.Time(r.Used), kept)
		}
	}
	return w.Flush()
}

func (o *imageOptions) remove(ctx context.Context, cmd *cobra.Command, store *image.Store, args []string) error {
	removed, err := store.Remove(ctx, args[0])
	if err != nil {
		return err
	}
	if removed {
		fmt.Fprintf(cmd.OutOrStdout(), "%s is removed\n", args[0])
	} else {
		fmt.Fprintf(cmd.OutOrStdout(), "%s: the name is removed; the image has others\n", args[0])
	}
	return nil
}

func (o *imageOptions) prune(ctx context.Context, cmd *cobra.Command, store *image.Store, _ []string) error {
	if err := store.Clean(ctx); err != nil {
		return err
	}
	removed, err := store.Prune(ctx, math.MaxInt64, time.Now())
	if err != nil {
		return err
	}
	size := int64(0)
	for _, r := range removed {
		size += r.Size
		fmt.Fprintln(cmd.OutOrStdout(), r.Title())
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "%d images are removed, %s\n", len(removed), humanize.IBytes(uint64(size)))
	return nil
}
