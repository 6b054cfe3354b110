package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"portal/internal/lab"
)

func newLabExecCommand() *cobra.Command {
	var name, container string
	var netOnly bool
	cmd := &cobra.Command{
		Use:   "exec [--name NAME] [-c CONTAINER | --net] NODE|POD|client -- COMMAND",
		Short: "Run a command on a node, on the client outside, or in a Pod",
		Long: `Run a command on a machine of a lab: a node, server, router or client (outside of the cluster). A Pod is named POD or
NAMESPACE/POD: the command is the container's own, as with kubectl exec. With --net it is one of this machine instead, in the Pod's
network and with its resolv.conf: for tools that the container lacks, and while no container runs.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) < 2 {
				return usageError{errors.New("lab exec takes a machine or Pod and a command: portal lab exec node1 -- ip address")}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if netOnly && container != "" {
				return usageError{errors.New("--net and -c: a Pod's containers share their network, give one of the two")}
			}
			return labExec(cmd.Context(), name, args[0], container, netOnly, args[1:])
		},
	}
	nameFlag(cmd, &name)
	cmd.Flags().StringVarP(&container, "container", "c", "", "container of the Pod; default: as kubectl exec chooses")
	cmd.Flags().BoolVar(&netOnly, "net", false, "enter the Pod's network alone, with a command of this machine")
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// labExec runs a command to its end, and ends as it did.
func labExec(ctx context.Context, name, target, container string, netOnly bool, args []string) error {
	running, err := findLab(name)
	if err != nil {
		return err
	}
	if args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		return usageError{errors.New("lab exec: no command")}
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if _, ok := running.Machines[target]; ok {
		m, err := running.Machine(target)
		if err != nil {
			return err
		}
		return exitAs(m.Run(cmd))
	}
	pod, err := labPod(ctx, running, target)
	if err != nil {
		return err
	}
	if !netOnly {
		return execInPod(ctx, running, pod, container, args)
	}
	m, err := running.Machine(pod.Spec.NodeName)
	if err != nil {
		return fmt.Errorf("the Pod %s: %w", target, err)
	}
	if pod.Spec.HostNetwork {
		return exitAs(m.Run(cmd))
	}
	return exitAs(m.RunInPod(lab.NodeDir(running.Dir, m.Name), string(pod.UID), cmd))
}

// execInPod runs a command in a container, as kubectl does. It ends this process with the command's exit status.
func execInPod(ctx context.Context, running *lab.Running, pod *corev1.Pod, container string, args []string) error {
	if !slices.ContainsFunc(pod.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.State.Running != nil }) {
		return fmt.Errorf("the Pod %s/%s is %s, and none of its containers runs: --net enters its network alone", pod.Namespace, pod.Name, pod.Status.Phase)
	}
	if err := os.Setenv("KUBECONFIG", labKubeconfig(running)); err != nil {
		return err
	}
	words := []string{"exec", "-n", pod.Namespace, pod.Name, "-i"}
	if isTerminal(os.Stdin) && isTerminal(os.Stdout) {
		words = append(words, "-t")
	}
	if container != "" {
		words = append(words, "-c", container)
	}
	inner, err := innerKubectl(append(append(words, "--"), args...))
	if err != nil {
		return err
	}
	if err := inner.ExecuteContext(ctx); err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	return nil
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// labPod asks the lab's server for a Pod.
func labPod(ctx context.Context, running *lab.Running, name string) (*corev1.Pod, error) {
	namespace, pod, found := strings.Cut(name, "/")
	if !found {
		namespace, pod = metav1.NamespaceDefault, name
	}
	config, err := clientcmd.BuildConfigFromFlags("", labKubeconfig(running))
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	got, err := client.CoreV1().Pods(namespace).Get(ctx, pod, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("there is neither a machine %s in the lab nor a Pod %s in the namespace %s", name, pod, namespace)
	}
	return got, err
}

// exitAs ends this process with a command's own exit status.
func exitAs(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		os.Exit(exit.ExitCode())
	}
	return err
}
