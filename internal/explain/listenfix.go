package explain

import (
	"fmt"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// addressChanges are what has a process listen at all addresses: a loopback address becomes all of its family, all of IPv4 all of both.
var addressChanges = [][2]string{{"127.0.0.1", "0.0.0.0"}, {"localhost", "0.0.0.0"}, {"[::1]", "[::]"}, {"0.0.0.0", "[::]"}}

// loopbackFix changes an argument or variable that says where to listen, if there is one; else it shows the container's command.
func (v *View) loopbackFix(p *corev1.Pod, number int32) []string {
	if fix := v.changeListen(p, number, addressChanges); fix != nil {
		return fix
	}
	return showCommand(p)
}

func showCommand(p *corev1.Pod) []string {
	return []string{kubectl(p.Namespace, "get pod %s -o jsonpath='{.spec.containers[*].command} {.spec.containers[*].args} {.spec.containers[*].env}'", p.Name)}
}

// changeListen changes an address in a Pod's arguments or variables. A text that is the address alone, or has the port beside it, is meant; if
// there is none, one in which the address is some part of a longer text.
func (v *View) changeListen(p *corev1.Pod, port int32, changes [][2]string) []string {
	for _, change := range []func(string) (string, bool){
		func(text string) (string, bool) { return everywhere(text, port, changes) },
		func(text string) (string, bool) { return anywhere(text, changes) },
	} {
		for i := range p.Spec.Containers {
			at := fmt.Sprintf("/containers/%d/", i)
			for _, list := range []struct {
				field string
				texts []string
			}{{"args", p.Spec.Containers[i].Args}, {"command", p.Spec.Containers[i].Command}} {
				for j, text := range list.texts {
					if to, ok := change(text); ok {
						return v.changePod(p, operation{"replace", fmt.Sprintf("%s%s/%d", at, list.field, j), to})
					}
				}
			}
			for j, env := range p.Spec.Containers[i].Env {
				if to, ok := change(env.Value); ok {
					return v.changePod(p, operation{"replace", fmt.Sprintf("%senv/%d/value", at, j), to})
				}
			}
		}
	}
	return nil
}

// everywhere is an argument with an address in it, changed.
func everywhere(text string, port int32, changes [][2]string) (string, bool) {
	for _, change := range changes {
		from, to := change[0], change[1]
		if text == from || strings.HasSuffix(text, "="+from) {
			return strings.ReplaceAll(text, from, strings.Trim(to, "[]")), true
		}
		if at := from + ":" + strconv.Itoa(int(port)); strings.Contains(text, at) {
			return strings.ReplaceAll(text, from, to), true
		}
	}
	return "", false
}

// anywhere changes an address that stands between other characters, such as in a program or a list of options.
func anywhere(text string, changes [][2]string) (string, bool) {
	for _, change := range changes {
		// Of IPv6 nobody knows how such a text wants it.
		if from, to := change[0], change[1]; !strings.ContainsRune(from+to, ':') && strings.Count(text, from) == 1 {
			return strings.ReplaceAll(text, from, to), true
		}
	}
	return "", false
}
