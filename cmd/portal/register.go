package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"portal/internal/externalpod"
)

// registerOptions are the flags of `portal register` and `portal deregister`.
type registerOptions struct {
	kubeconfig, namespace, output string
	address, probe, labels, node  string
	ports                         []string
}

func newRegisterCommand() *cobra.Command {
	o := registerOptions{}
	cmd := &cobra.Command{
		Use:   "register NAME --address ADDRESS --port PORT",
		Short: "Make a server that Portal does not run a backend of Services",
		Long: "Creates a Pod that stands for a server anywhere: Services whose selector matches its labels send traffic to its address while a node\n" +
			"finds that it answers. The server itself is not touched. portal deregister removes the Pod.",
		Example: "  portal register db-1 --address 192.0.2.7 --port 5432 -l app=db\n" +
			"  portal register web-1 --address 192.0.2.8,2001:db8::8 --port http:8080 --probe http:/healthz -l app=web",
		Args: oneName,
		RunE: o.run(o.register),
	}
	f := cmd.Flags()
	f.StringVar(&o.address, "address", "", "the server's IP address, or one of each family separated by a comma")
	f.StringSliceVar(&o.ports, "port", nil, "a port that the server has: [NAME:]PORT[/PROTOCOL], such as 80, http:8080 or dns:53/UDP; may be repeated")
	f.StringVar(&o.probe, "probe", "", "how the server is found to answer, at its first port: tcp, http:/PATH, https:/PATH, grpc or none (default: tcp if that port is of TCP, else none)")
	f.StringVarP(&o.labels, "labels", "l", "", "the Pod's labels, which Services select: KEY=VALUE,… (default: app=NAME)")
	f.StringVar(&o.node, "node", "", "the node that asks the server (default: any)")
	o.common(cmd)
	return cmd
}

func newDeregisterCommand() *cobra.Command {
	o := registerOptions{}
	cmd := &cobra.Command{
		Use:   "deregister NAME",
		Short: "Remove a server that was registered from the backends of Services",
		Args:  oneName,
		RunE:  o.run(o.deregister),
	}
	o.common(cmd)
	return cmd
}

func (o *registerOptions) common(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", kubeconfigHelp)
	f.StringVarP(&o.namespace, "namespace", "n", metav1.NamespaceDefault, "the namespace of the Pod and its Services")
	outputFlag(f, &o.output)
}

func oneName(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usageError{fmt.Errorf("%s takes one argument: the name that the server has in the cluster", cmd.CommandPath())}
	}
	return nil
}

func (o *registerOptions) run(do func(context.Context, *cobra.Command, kubernetes.Interface, string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		if err := checkOutput(o.output); err != nil {
			return err
		}
		if bad := validation.IsDNS1123Subdomain(args[0]); len(bad) > 0 {
			return usageError{fmt.Errorf("NAME %q: %s", args[0], bad[0])}
		}
		if bad := validation.IsDNS1123Label(o.namespace); len(bad) > 0 {
			return usageError{fmt.Errorf("--namespace %q: %s", o.namespace, bad[0])}
		}
		// What is wrong with the flags is said before the server is asked for.
		if cmd.Name() == "register" {
			if _, err := o.pod(args[0]); err != nil {
				return usageError{err}
			}
		}
		client, _, err := apiClient(o.kubeconfig)
		if err != nil {
			return err
		}
		return do(cmd.Context(), cmd, client, args[0])
	}
}

// pod is what the flags say.
func (o *registerOptions) pod(name string) (*corev1.Pod, error) {
	if o.address == "" {
		return nil, errors.New("--address: is required: where the server is")
	}
	addresses, err := externalpod.ParseAddresses(o.address)
	if err != nil {
		return nil, fmt.Errorf("--address: %w", err)
	}
	if len(o.ports) == 0 {
		return nil, errors.New("--port: is required: where the server answers")
	}
	var ports []corev1.ContainerPort
	seen := map[string]bool{}
	for _, text := range o.ports {
		p, err := parsePort(text)
		if err != nil {
			return nil, fmt.Errorf("--port %q: %w", text, err)
		}
		for _, key := range []string{"name " + p.Name, fmt.Sprint(p.ContainerPort, p.Protocol)} {
			if seen[key] && key != "name " {
				return nil, fmt.Errorf("--port %q: is there twice", text)
			}
			seen[key] = true
		}
		ports = append(ports, p)
	}
	probe, err := parseProbe(o.probe, ports[0])
	if err != nil {
		return nil, fmt.Errorf("--probe %q: %w", o.probe, err)
	}
	set := labels.Set{"app": name}
	if o.labels != "" {
		if set, err = labels.ConvertSelectorToLabelsMap(o.labels); err != nil {
			return nil, fmt.Errorf("--labels %q: must be KEY=VALUE,…: %w", o.labels, err)
		}
	} else if bad := validation.IsValidLabelValue(name); len(bad) > 0 {
		return nil, fmt.Errorf("--labels: is required with the name %s, which can't be the label app: %s", name, bad[0])
	}
	var text []string
	for _, a := range addresses {
		text = append(text, a.String())
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Namespace: o.namespace, Labels: set, Annotations: map[string]string{externalpod.AddressesAnnotation: strings.Join(text, ",")},
		},
		Spec: corev1.PodSpec{
			RuntimeClassName: ptr.To(externalpod.RuntimeClass), NodeName: o.node, AutomountServiceAccountToken: ptr.To(false),
			EnableServiceLinks: ptr.To(false), Tolerations: stay,
			Containers: []corev1.Container{{
				Name: externalpod.Image, Image: externalpod.Image, ImagePullPolicy: corev1.PullNever, Ports: ports, ReadinessProbe: probe,
			}},
		},
	}, nil
}

// stay keeps a server registered when the node that asks it is lost: nothing would register it again.
var stay = []corev1.Toleration{
	{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
	{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
}

func parsePort(text string) (corev1.ContainerPort, error) {
	p := corev1.ContainerPort{Protocol: corev1.ProtocolTCP}
	rest := text
	if name, number, ok := strings.Cut(rest, ":"); ok {
		if bad := validation.IsValidPortName(name); len(bad) > 0 {
			return p, fmt.Errorf("the name %q: %s", name, bad[0])
		}
		p.Name, rest = name, number
	}
	if number, protocol, ok := strings.Cut(rest, "/"); ok {
		switch p.Protocol = corev1.Protocol(strings.ToUpper(protocol)); p.Protocol {
		case corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP:
		default:
			return p, fmt.Errorf("the protocol %q: must be TCP, UDP or SCTP", protocol)
		}
		rest = number
	}
	n, err := strconv.Atoi(rest)
	if err != nil || n < 1 || n > 65535 {
		return p, errors.New("must be [NAME:]PORT[/PROTOCOL], with a port from 1 to 65535")
	}
	p.ContainerPort = int32(n)
	return p, nil
}

// parseProbe is how the server is asked; nil: it is not.
func parseProbe(text string, at corev1.ContainerPort) (*corev1.Probe, error) {
	if text == "" {
		text = "none"
		if at.Protocol == corev1.ProtocolTCP {
			text = "tcp"
		}
	}
	port := intstr.FromInt32(at.ContainerPort)
	probe := &corev1.Probe{PeriodSeconds: 2, TimeoutSeconds: 2, FailureThreshold: 2}
	kind, path, _ := strings.Cut(text, ":")
	if kind != "none" && at.Protocol != corev1.ProtocolTCP {
		return nil, fmt.Errorf("asks by TCP, but the first port is of %s: name a TCP port first, or use none", at.Protocol)
	}
	switch kind {
	case "none", "tcp", "grpc":
		if path != "" {
			return nil, fmt.Errorf("takes no path: use %s alone", kind)
		}
	}
	switch kind {
	case "none":
		return nil, nil
	case "tcp":
		probe.TCPSocket = &corev1.TCPSocketAction{Port: port}
	case "grpc":
		probe.GRPC = &corev1.GRPCAction{Port: at.ContainerPort}
	case "http", "https":
		if !strings.HasPrefix(path, "/") {
			return nil, fmt.Errorf("needs a path: %s:/PATH", kind)
		}
		probe.HTTPGet = &corev1.HTTPGetAction{Port: port, Path: path, Scheme: corev1.URIScheme(strings.ToUpper(kind))}
	default:
		return nil, errors.New("must be tcp, http:/PATH, https:/PATH, grpc or none")
	}
	return probe, nil
}

func (o *registerOptions) register(ctx context.Context, cmd *cobra.Command, client kubernetes.Interface, name string) error {
	pod, err := o.pod(name)
	if err != nil {
		return usageError{err}
	}
	if err := notInServiceRanges(ctx, client, pod); err != nil {
		return err
	}
	if err := ensureExternalClass(ctx, client); err != nil {
		return err
	}
	made, err := client.CoreV1().Pods(o.namespace).Create(ctx, pod, metav1.CreateOptions{})
	switch {
	case apierrors.IsAlreadyExists(err):
		return fmt.Errorf("%s is registered already, or a Pod of this name exists: choose another, or run portal deregister %s -n %s first", name, name, o.namespace)
	case err != nil:
		return fmt.Errorf("register %s: %w", name, err)
	}
	if o.output == "json" {
		made.APIVersion, made.Kind = "v1", "Pod"
		return printJSON(cmd.OutOrStdout(), made)
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s/%s is registered at %s\n", o.namespace, name, pod.Annotations[externalpod.AddressesAnnotation])
	fmt.Fprintf(cmd.ErrOrStderr(), "Services in %s that select %s send traffic to it while it answers: portal kubectl get pod %s -n %s\n",
		o.namespace, labels.Set(pod.Labels), name, o.namespace)
	return nil
}

// notInServiceRanges refuses addresses of Services: no proxy sends traffic from one Service on to the next. Without the right to read the
// ranges, the API server warns.
func notInServiceRanges(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod) error {
	list, err := client.NetworkingV1().ServiceCIDRs().List(ctx, metav1.ListOptions{})
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the ranges of Services: %w", err)
	}
	addresses, err := externalpod.Addresses(pod)
	if err != nil {
		return err
	}
	for _, item := range list.Items {
		for _, text := range item.Spec.CIDRs {
			p, err := netip.ParsePrefix(text)
			for _, a := range addresses {
				if err == nil && p.Contains(a) {
					return usageError{fmt.Errorf("--address: %s is in %s, the range of Services' own addresses; use the address of the server", a, p)}
				}
			}
		}
	}
	return nil
}

// ensureExternalClass makes the RuntimeClass if it is missing and the caller may.
func ensureExternalClass(ctx context.Context, client kubernetes.Interface) error {
	classes := client.NodeV1().RuntimeClasses()
	_, err := classes.Get(ctx, externalpod.RuntimeClass, metav1.GetOptions{})
	if err == nil || apierrors.IsForbidden(err) {
		return nil // if there is none, that is said when the Pod is created
	}
	if !apierrors.IsNotFound(err) {
		return fmt.Errorf("read RuntimeClass %s: %w", externalpod.RuntimeClass, err)
	}
	_, err = classes.Create(ctx, &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: externalpod.RuntimeClass}, Handler: externalpod.RuntimeClass}, metav1.CreateOptions{})
	switch {
	case apierrors.IsForbidden(err):
		return fmt.Errorf("there is no RuntimeClass %s, and you may not create it: ask an administrator, who decides whether Pods may stand for any address", externalpod.RuntimeClass)
	case err != nil && !apierrors.IsAlreadyExists(err):
		return fmt.Errorf("create RuntimeClass %s: %w", externalpod.RuntimeClass, err)
	}
	return nil
}

func (o *registerOptions) deregister(ctx context.Context, cmd *cobra.Command, client kubernetes.Interface, name string) error {
	pods := client.CoreV1().Pods(o.namespace)
	pod, err := pods.Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%s is not registered in the namespace %s", name, o.namespace)
	case err != nil:
		return fmt.Errorf("deregister %s: %w", name, err)
	case !externalpod.Is(pod):
		return fmt.Errorf("%s is a Pod that a node runs, not a registered server: delete it with portal kubectl delete pod %s -n %s", name, name, o.namespace)
	}
	if err := pods.Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deregister %s: %w", name, err)
	}
	if o.output == "json" {
		pod.APIVersion, pod.Kind = "v1", "Pod"
		return printJSON(cmd.OutOrStdout(), pod)
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s/%s is deregistered\n", o.namespace, name)
	return nil
}
