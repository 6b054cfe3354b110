package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"portal/internal/explain"
	"portal/internal/explain/gather"
)

// foundError makes the exit status 1 and prints nothing: what was found has been said.
type foundError struct{}

func (foundError) Error() string { return "something is wrong" }

type explainOptions struct {
	kubeconfig, context string
	namespace           string
	output              string
	zone                string
	verbose             bool
	nodes               bool
	probe               bool
	timeout             time.Duration

	// reached is the API server that was asked, host:port.
	reached string
}

func newExplainCommand() *cobra.Command {
	var o explainOptions
	cmd := &cobra.Command{
		Use:   "explain [[service] NAME | pod NAME | name DNS-NAME | address IP[:PORT] | ingress NAME]",
		Short: "Why a Service, Pod, name, address or Ingress does or does not answer",
		Long: `Look at everything between a name and the process that should answer: the Service, its selector, Pods, ports, EndpointSlices,
policies, nodes, their proxies, DNS. The first line says what is wrong; then comes the evidence, and what to type. A
name alone is that of a Service. Without arguments it looks at all Services and lists what is wrong, the worst first.

It only reads, works with any Kubernetes, and says what it may not see. The exit status is 0 if nothing is wrong and 1 if something is.`,
		Example: `  portal explain
  portal explain web -n shop
  portal explain name web.shop
  portal explain address 10.96.12.7:80`,
		RunE: func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	f := cmd.Flags()
	o.addFlags(cmd)
	f.StringVarP(&o.namespace, "namespace", "n", "default", "namespace of the object; of a name: that of the Pod that looks it up")
	f.StringVar(&o.zone, "zone", "cluster.local", "the cluster's DNS zone")
	f.BoolVar(&o.probe, "probe", true, "have nodes connect to the Service that is asked about, and ask DNS for a name")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "print what is as it should be, too")
	return cmd
}

// addFlags adds what `portal status` has too.
func (o *explainOptions) addFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	f.StringVar(&o.context, "context", "", "context of the kubeconfig")
	outputFlag(f, &o.output)
	f.BoolVar(&o.nodes, "ask-nodes", true, "ask nodes for what they know: needs the right to get nodes/proxy")
	f.DurationVar(&o.timeout, "timeout", 30*time.Second, "time limit for reading everything")
}

// question reads the arguments.
func (o *explainOptions) question(args []string) (explain.Question, error) {
	if len(args) == 0 {
		return explain.Question{}, nil
	}
	kind, name := explainKind(args[0]), ""
	if k, n, ok := strings.Cut(args[0], "/"); ok && len(args) == 1 {
		kind, name = explainKind(k), n
	} else if len(args) == 2 {
		name = args[1]
	} else if len(args) == 1 && !slices.Contains(explain.Kinds, kind) {
		kind, name = guessKind(args[0]), args[0]
	}
	if !slices.Contains(explain.Kinds, kind) {
		return explain.Question{}, fmt.Errorf("%q can't be explained: want service NAME, pod NAME, name DNS-NAME, address IP[:PORT] or ingress NAME", args[0])
	}
	if len(args) > 2 {
		return explain.Question{}, fmt.Errorf("explain %s takes one name, not %d: %q", kind, len(args)-1, args[1:])
	}
	if name == "" {
		return explain.Question{}, fmt.Errorf("explain %s: a name is missing", kind)
	}
	q := explain.Question{Kind: kind, Name: name}
	if kind != "address" {
		q.Namespace = o.namespace
	}
	if namespace, rest, ok := strings.Cut(name, "/"); ok && kind != "address" && kind != "name" {
		q.Namespace, q.Name = namespace, rest
	}
	return q, nil
}

// explainKind is the kind that somebody means: kubectl's short and plural names are understood.
func explainKind(name string) string {
	switch name = strings.ToLower(name); name {
	case "svc", "services":
		return "service"
	case "po", "pods":
		return "pod"
	case "ing", "ingresses":
		return "ingress"
	}
	return name
}

// guessKind is the kind of a name that was given without one: names of Services have no dots, and no colons.
func guessKind(name string) string {
	if _, err := netip.ParseAddr(name); err == nil || strings.Contains(name, ":") {
		return "address"
	}
	if strings.Contains(name, ".") {
		return "name"
	}
	return "service"
}

func (o *explainOptions) run(cmd *cobra.Command, args []string) error {
	q, err := o.question(args)
	if err != nil {
		return usageError{err}
	}
	options := gather.Options{Zone: strings.Trim(o.zone, "."), Namespace: o.namespace, SkipNodes: !o.nodes, Probe: o.probe}
	options.Focus = func(e *explain.Evidence) explain.Focus { return explain.FocusOn(e, q) }
	if q.Namespace != "" {
		options.Namespace = q.Namespace
	}
	view, err := o.look(cmd, options, q)
	if err != nil {
		return err
	}
	answer, err := explain.Ask(view, q)
	if err != nil {
		return usageError{err}
	}
	if o.output == "json" {
		err = printJSON(cmd.OutOrStdout(), answer)
	} else {
		err = explain.Print(cmd.OutOrStdout(), answer, o.verbose)
	}
	if err == nil && !answer.Healthy {
		err = foundError{}
	}
	return err
}

// startPatience is how long Pods that have just started may take until they listen.
const startPatience = 10 * time.Second

// look reads the evidence; again if the Pods that the question is about are just starting.
func (o *explainOptions) look(cmd *cobra.Command, options gather.Options, q explain.Question) (*explain.View, error) {
	for begun, said := time.Now(), false; ; {
		evidence, err := o.gather(cmd, options)
		if err != nil {
			return nil, err
		}
		view := explain.Look(evidence)
		starting := view.Starting(q)
		if len(starting) == 0 || time.Since(begun) > startPatience {
			return view, nil
		}
		if !said {
			said = true
			fmt.Fprintf(cmd.ErrOrStderr(), "waiting until Pod %s, which has just started, listens\n", starting[0])
		}
		if !wait(cmd.Context(), time.Second) {
			return nil, cmd.Context().Err()
		}
	}
}

// gather reads the evidence, within the time limit.
func (o *explainOptions) gather(cmd *cobra.Command, options gather.Options) (*explain.Evidence, error) {
	if err := checkOutput(o.output); err != nil {
		return nil, err
	}
	if o.timeout <= 0 {
		return nil, usageError{errors.New("--timeout: must be more than 0")}
	}
	config, err := apiConfigFor(o.kubeconfig, o.context)
	if err != nil {
		return nil, usageError{err}
	}
	if at, _, err := rest.DefaultServerUrlFor(config); err == nil {
		o.reached = at.Host
	}
	compressUnlessHere(config)
	collectAt(garbageOfLook)
	ctx, cancel := context.WithTimeout(cmd.Context(), o.timeout)
	defer cancel()
	options.Config = config
	return gather.Gather(ctx, options)
}
