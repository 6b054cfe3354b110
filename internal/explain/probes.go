package explain

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// probeOf is a container's probe of a kind: readiness, liveness or startup.
func probeOf(c *corev1.Container, kind string) *corev1.Probe {
	switch kind {
	case "liveness":
		return c.LivenessProbe
	case "startup":
		return c.StartupProbe
	}
	return c.ReadinessProbe
}

// probePort is the port that a container's probe asks, as a number; 0: none.
func probePort(c *corev1.Container, kind string) (port int32, named string) {
	p := probeOf(c, kind)
	if p == nil {
		return 0, ""
	}
	var at intstr.IntOrString
	switch {
	case p.HTTPGet != nil:
		at = p.HTTPGet.Port
	case p.TCPSocket != nil:
		at = p.TCPSocket.Port
	case p.GRPC != nil:
		return p.GRPC.Port, ""
	default:
		return 0, ""
	}
	if at.Type == intstr.Int {
		return at.IntVal, ""
	}
	for _, cp := range c.Ports {
		if cp.Name == at.StrVal {
			return cp.ContainerPort, ""
		}
	}
	return 0, at.StrVal
}

// refusedConnection is how a probe reports that nothing listens.
const refusedConnection = "connection refused"

// unhealthy is what the newest Event about a probe of a kind says; of one container, or of any. A refused connection counts last: between its restarts
// a container refuses, whatever it answers otherwise.
func (v *View) unhealthy(p *corev1.Pod, kind, container string) (string, bool) {
	var newest *corev1.Event
	later := func(e *corev1.Event) bool {
		if newest == nil {
			return true
		}
		if a, b := strings.Contains(e.Message, refusedConnection), strings.Contains(newest.Message, refusedConnection); a != b {
			return b
		}
		return lastSeen(e).After(lastSeen(newest))
	}
	for _, e := range v.events[podRef(p)] {
		if e.Reason != "Unhealthy" || !strings.HasPrefix(strings.ToLower(e.Message), kind) {
			continue
		}
		if field := e.InvolvedObject.FieldPath; container != "" && strings.HasPrefix(field, "spec.containers{") && field != "spec.containers{"+container+"}" {
			continue
		}
		if later(e) {
			newest = e
		}
	}
	if newest == nil {
		return "", false
	}
	return strings.TrimSpace(newest.Message), true
}

// probeHost is another host than the Pod that a probe asks, or nothing.
func probeHost(p *corev1.Pod, kind string) string {
	for _, i := range suspects(p, kind) {
		host := ""
		switch probe := probeOf(&p.Spec.Containers[i], kind); {
		case probe.HTTPGet != nil:
			host = probe.HTTPGet.Host
		case probe.TCPSocket != nil:
			host = probe.TCPSocket.Host
		}
		if host != "" && host != p.Status.PodIP {
			return host
		}
	}
	return ""
}

var httpStatus = regexp.MustCompile(`(?i)status ?(?:code)?:? ?(\d{3})`)

// probeTrouble reads what a probe got, in Portal's words or in the kubelet's.
func (v *View) probeTrouble(p *corev1.Pod, kind, message string, at time.Time, rank int) trouble {
	t := trouble{code: "pods-unready", reason: "its " + kind + " probe fails", detail: message, since: at, rank: rank, probe: kind}
	if kind != "readiness" {
		t.code = kind + "-failing"
	}
	if kind == "liveness" {
		t.reason = "its liveness probe fails, so that it is restarted again and again"
	}
	if why, ok := v.wrongProbePort(p, kind); ok {
		t.code, t.reason, t.rank = kind+"-port", why, 8
		return t
	}
	if why, ok := v.undeclaredProbePort(p, kind); ok && strings.Contains(message, refusedConnection) && probeHost(p, kind) == "" {
		t.code, t.reason, t.rank = kind+"-port", why, 8
		return t
	}
	if host := probeHost(p, kind); host != "" {
		t.code, t.rank = kind+"-host", 8
		t.reason = fmt.Sprintf("its %s probe asks the host %s instead of the Pod (field host)", kind, host)
		return t
	}
	status := 0
	if m := httpStatus.FindStringSubmatch(message); m != nil {
		status, _ = strconv.Atoi(m[1])
	}
	is := func(suffix string) { t.code, t.rank = kind+suffix, max(rank, 6) }
	switch {
	case status == 404:
		is("-path")
	case strings.Contains(message, "deadline exceeded") || strings.Contains(message, "Client.Timeout") || strings.Contains(message, "timed out") || strings.Contains(message, "in time"):
		is("-timeout")
	case strings.Contains(message, "server gave HTTP response to HTTPS client") || strings.Contains(message, "first record does not look like a TLS handshake"):
		is("-scheme")
		t.reason += ": it speaks TLS (scheme: HTTPS), and the server does not"
	case status == 400 || strings.Contains(message, "malformed HTTP response"):
		is("-scheme")
		t.reason += ": a server that speaks TLS answers so to a request without it (scheme: HTTP)"
	case strings.Contains(message, "could not be run") || strings.Contains(message, "no such file or directory") || strings.Contains(message, "executable file not found") || strings.Contains(message, "exit code 127") || strings.Contains(message, "exit code 126"):
		is("-command")
		t.reason += ": its command is not in the image, or can't be run"
	}
	return t
}

// delayed: a probe that has not begun yet, and will not for a while.
func (v *View) delayed(p *corev1.Pod, kind string) (why string, fix []string) {
	for _, i := range suspects(p, kind) {
		c := &p.Spec.Containers[i]
		probe := probeOf(c, kind)
		if probe.InitialDelaySeconds < 30 {
			continue
		}
		for _, status := range p.Status.ContainerStatuses {
			if status.Name != c.Name || status.State.Running == nil {
				continue
			}
			left := status.State.Running.StartedAt.Add(time.Duration(probe.InitialDelaySeconds) * time.Second).Sub(v.Now)
			if left <= 0 {
				continue
			}
			why = fmt.Sprintf("the %s probe of the container %s begins in %s only (initialDelaySeconds: %d)", kind, c.Name, ago(left), probe.InitialDelaySeconds)
			return why, v.changePod(p, operation{"replace", fmt.Sprintf("/containers/%d/%sProbe/initialDelaySeconds", i, kind), 1})
		}
	}
	return "", nil
}

// wrongProbePort: the probe asks a port at which nobody listens.
func (v *View) wrongProbePort(p *corev1.Pod, kind string) (string, bool) {
	for _, i := range suspects(p, kind) {
		c := &p.Spec.Containers[i]
		port, missing := probePort(c, kind)
		switch {
		case missing != "":
			return fmt.Sprintf("the %s probe of the container %s asks the port %q, and the container has none of that name", kind, c.Name, missing), true
		case port == 0:
		default:
			if open, known := v.listens(p, corev1.ProtocolTCP, port); known && open == nowhere && len(v.openPorts(p, corev1.ProtocolTCP)) > 0 {
				return fmt.Sprintf("the %s probe of the container %s asks port %d, and its processes listen at %s", kind, c.Name, port, v.portList(p, corev1.ProtocolTCP)), true
			}
		}
	}
	return "", false
}

// undeclaredProbePort: nothing listens in the Pod at this moment, since its containers are being restarted, and the probe asks a port that its container does not
// declare, while it declares others.
func (v *View) undeclaredProbePort(p *corev1.Pod, kind string) (string, bool) {
	if len(v.openPorts(p, corev1.ProtocolTCP)) > 0 {
		return "", false
	}
	for _, i := range suspects(p, kind) {
		c := &p.Spec.Containers[i]
		port, _ := probePort(c, kind)
		tcp := slices.DeleteFunc(slices.Clone(c.Ports), func(cp corev1.ContainerPort) bool { return containerProtocol(&cp) != corev1.ProtocolTCP })
		if port == 0 || len(tcp) == 0 || slices.ContainsFunc(tcp, func(cp corev1.ContainerPort) bool { return cp.ContainerPort == port }) {
			continue
		}
		return fmt.Sprintf("the %s probe of the container %s asks port %d, where nothing listens, and the container declares port %d", kind, c.Name, port, tcp[0].ContainerPort), true
	}
	return "", false
}

func (v *View) portList(p *corev1.Pod, protocol corev1.Protocol) string {
	return numbers(v.openPorts(p, protocol))
}

func numbers(ports []int32) string {
	var out []string
	for _, n := range ports {
		out = append(out, strconv.Itoa(int(n)))
	}
	return some(out)
}

// probeFix changes what a probe asks for, or how long it waits. kind and what are the two parts of a code, such as readiness-path.
func (v *View) probeFix(p *corev1.Pod, kind, what string) []string {
	for _, i := range suspects(p, kind) {
		c := &p.Spec.Containers[i]
		probe := probeOf(c, kind)
		field := fmt.Sprintf("/containers/%d/%sProbe", i, kind)
		switch {
		case what == "port":
			if fix := v.probePortFix(p, c, kind, field); fix != nil {
				return fix
			}
		case what == "host" && probe.HTTPGet != nil:
			return v.changePod(p, operation{Op: "remove", Path: field + "/httpGet/host"})
		case what == "host" && probe.TCPSocket != nil:
			return v.changePod(p, operation{Op: "remove", Path: field + "/tcpSocket/host"})
		case what == "timeout":
			return v.changePod(p, operation{"add", field + "/timeoutSeconds", max(5, 5*probe.TimeoutSeconds)})
		case what == "command" && probe.Exec != nil:
			return v.changePod(p, operation{Op: "remove", Path: field})
		case what == "path" && probe.HTTPGet != nil:
			return v.changePod(p, operation{"add", field + "/httpGet/path", "/"})
		case what == "scheme" && probe.HTTPGet != nil:
			scheme := corev1.URISchemeHTTPS
			if probe.HTTPGet.Scheme == corev1.URISchemeHTTPS {
				scheme = corev1.URISchemeHTTP
			}
			return v.changePod(p, operation{"add", field + "/httpGet/scheme", scheme})
		}
	}
	return nil
}

// suspects are the containers with a probe of a kind, by their index: first those that it is probably about.
func suspects(p *corev1.Pod, kind string) (out []int) {
	fails := func(i int) bool {
		for _, s := range p.Status.ContainerStatuses {
			if s.Name != p.Spec.Containers[i].Name {
				continue
			}
			switch kind {
			case "readiness":
				return !s.Ready
			case "startup":
				return s.Started == nil || !*s.Started
			default:
				return s.RestartCount > 0
			}
		}
		return false
	}
	var fine []int
	for i := range p.Spec.Containers {
		switch {
		case probeOf(&p.Spec.Containers[i], kind) == nil:
		case fails(i):
			out = append(out, i)
		default:
			fine = append(fine, i)
		}
	}
	return append(out, fine...)
}

// withoutProbe has a Pod serve without the probe that fails: for one that asks what can't be mended from here.
func (v *View) withoutProbe(p *corev1.Pod, kind string) []string {
	all := suspects(p, kind)
	if len(all) == 0 {
		return nil
	}
	return v.changePod(p, operation{Op: "remove", Path: fmt.Sprintf("/containers/%d/%sProbe", all[0], kind)})
}

// probePortFix has the probe ask the port that the container serves at.
func (v *View) probePortFix(p *corev1.Pod, c *corev1.Container, kind, field string) []string {
	port, missing := probePort(c, kind)
	right := v.rightPort(p, c)
	if port == 0 && missing == "" || right == 0 || right == port {
		return nil
	}
	how, probe := "httpGet", probeOf(c, kind)
	if probe.TCPSocket != nil {
		how = "tcpSocket"
	} else if probe.GRPC != nil {
		how = "grpc"
	}
	return v.changePod(p, operation{"replace", field + "/" + how + "/port", right})
}

// rightPort is where a container serves: the only port that it declares, or the lowest that is open.
func (v *View) rightPort(p *corev1.Pod, c *corev1.Container) int32 {
	open := v.openPorts(p, corev1.ProtocolTCP)
	for _, cp := range c.Ports {
		if slices.Contains(open, cp.ContainerPort) || len(open) == 0 {
			return cp.ContainerPort
		}
	}
	if len(open) > 0 {
		return open[0]
	}
	return 0
}
