package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/yaml"

	"portal/internal/intent"
	"portal/internal/intent/watch"
	"portal/internal/serviceenv"
)

type envOptions struct {
	kubeconfig string
	namespace  string
	format     string
	file       string
	all        bool
	noLinks    bool
	timeout    time.Duration
}

func newEnvCommand() *cobra.Command {
	var o envOptions
	cmd := &cobra.Command{
		Use:   "env",
		Short: "Print the environment variables by which a Pod finds Services",
		Long: `Print the environment variables by which a Pod finds Services.

  eval $(portal env -n shop)                      for a shell or a script
  portal env -n shop --format docker > shop.env   for docker --env-file or a unit's EnvironmentFile
  kubectl get svc -o json | portal env -f -       without access to an API server`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	f.StringVarP(&o.namespace, "namespace", "n", "default", "the Pod's namespace")
	f.StringVar(&o.format, "format", "sh", "one of "+strings.Join(serviceenv.Formats, ", "))
	f.StringVarP(&o.file, "filename", "f", "", "read a Service or a List of Services from this file instead of the API; - is standard input")
	f.BoolVar(&o.all, "all", false, "print all Services, in order, regardless of namespace")
	f.BoolVar(&o.noLinks, "no-service-links", false, "print what a Pod with enableServiceLinks: false gets")
	f.DurationVar(&o.timeout, "timeout", 10*time.Second, "time limit for reading from the API")
	return cmd
}

func (o *envOptions) run(cmd *cobra.Command) error {
	if !slices.Contains(serviceenv.Formats, o.format) {
		return usageError{fmt.Errorf("--format %q: must be one of %s", o.format, strings.Join(serviceenv.Formats, ", "))}
	}
	services, err := o.services(cmd)
	if err != nil {
		return err
	}
	var vars []serviceenv.Var
	if o.all {
		vars = serviceenv.All(services)
	} else {
		vars = serviceenv.ForPod(services, o.namespace, !o.noLinks)
	}
	skipped, err := serviceenv.Write(cmd.OutOrStdout(), vars, o.format)
	if len(skipped) > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "left out, because names of shell variables cannot begin with a digit: %s\n", strings.Join(skipped, " "))
	}
	return err
}

func (o *envOptions) services(cmd *cobra.Command) ([]*intent.Service, error) {
	switch o.file {
	case "":
		return o.fromAPI(cmd.Context())
	case "-":
		return readServices(cmd.InOrStdin(), "standard input")
	}
	f, err := os.Open(o.file)
	if err != nil {
		return nil, usageError{fmt.Errorf("--filename: %w", err)}
	}
	defer f.Close()
	return readServices(f, o.file)
}

// fromAPI lists the Services once, as a Pod's start does.
func (o *envOptions) fromAPI(ctx context.Context) ([]*intent.Service, error) {
	config, err := apiConfig(o.kubeconfig)
	if err != nil {
		return nil, usageError{err}
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	return watch.ListServices(ctx, config)
}

// readServices reads JSON or YAML: Services, Lists of Services, one document after the other.
func readServices(r io.Reader, from string) ([]*intent.Service, error) {
	var out []*intent.Service
	d := yaml.NewYAMLOrJSONDecoder(r, 4096)
	for {
		var doc struct {
			corev1.Service `json:",inline"`
			Items          []corev1.Service `json:"items"`
		}
		err := d.Decode(&doc)
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("%s holds no List of Services: %w", from, err)
		}
		switch {
		case doc.Kind == "Service":
			out = append(out, watch.Service(&doc.Service))
		case strings.HasSuffix(doc.Kind, "List"):
			for i := range doc.Items {
				if k := doc.Items[i].Kind; k == "" || k == "Service" {
					out = append(out, watch.Service(&doc.Items[i]))
				}
			}
		case doc.Kind != "":
			return nil, fmt.Errorf("%s holds a %s: want a Service or a List of Services", from, doc.Kind)
		}
	}
}
