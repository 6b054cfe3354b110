package service

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// portRequest is what one request wants of the node-port range: node ports, and a port for health checks.
type portRequest struct {
	spec   *corev1.ServiceSpec
	choice Choice

	creating bool
	nodes    bool // node ports are wanted
	health   bool // a health-check port is wanted, and there was none

	kept  []int32 // node ports that the Service has: any of its ports may go on using them
	held  []int32 // all that it has, its health-check port included
	taken []int32 // got in this request
}

func newPortRequest(spec *corev1.ServiceSpec, before *corev1.Service, choice Choice) *portRequest {
	r := &portRequest{spec: spec, choice: choice, creating: before == nil, nodes: opensNodePorts(spec), health: healthChecked(spec)}
	if before != nil {
		has := Claims(before)
		r.kept, r.held = has.NodePorts, has.Ports()
		r.health = r.health && !healthChecked(&before.Spec)
	}
	return r
}

// settle takes what the user asked for before it chooses the rest, so that it never chooses a number that they ask for next.
func (r *portRequest) settle() field.ErrorList {
	if r.creating && wantsNodePorts(r.spec) {
		r.share()
	}
	for _, step := range []func() *field.Error{r.takeNodePorts, r.takeHealthPort, r.chooseNodePorts, r.chooseHealthPort} {
		if err := step(); err != nil {
			return field.ErrorList{err}
		}
	}
	return nil
}

// share copies a node port to the other ports of the same number: TCP and UDP on port 53 are one thing to a user, and
// cost one number. Only a creation does so; an update leaves each port its own.
func (r *portRequest) share() {
	for i := range r.spec.Ports {
		if port := &r.spec.Ports[i]; port.NodePort == 0 {
			port.NodePort = r.twin(port.Port)
		}
	}
}

// twin is the first node port that any port of the number n has.
func (r *portRequest) twin(n int32) int32 {
	for i := range r.spec.Ports {
		if p := &r.spec.Ports[i]; p.Port == n && p.NodePort != 0 {
			return p.NodePort
		}
	}
	return 0
}

func (r *portRequest) takeNodePorts() *field.Error {
	shared := map[int32]int32{}
	for i := range r.spec.Ports {
		port := &r.spec.Ports[i]
		switch {
		case !r.nodes || port.NodePort == 0:
			continue
		case !r.creating && (slices.Contains(r.kept, port.NodePort) || slices.Contains(r.taken, port.NodePort)):
			continue
		case r.creating && shared[port.Port] == port.NodePort:
			continue
		}
		if err := r.take(port.NodePort); err != nil {
			return field.Invalid(at("ports").Index(i).Child("nodePort"), port.NodePort, err.Error())
		}
		if shared[port.Port] == 0 {
			shared[port.Port] = port.NodePort
		}
	}
	return nil
}

func (r *portRequest) takeHealthPort() *field.Error {
	port := r.spec.HealthCheckNodePort
	if !r.health || port == 0 {
		return nil
	}
	if slices.Contains(nodePorts(r.spec), port) {
		return field.Invalid(at("healthCheckNodePort"), port, "must not be a node port of the Service")
	}
	if err := r.take(port); err != nil {
		return field.Invalid(at("healthCheckNodePort"), port, err.Error())
	}
	return nil
}

func (r *portRequest) chooseNodePorts() *field.Error {
	for i := range r.spec.Ports {
		port := &r.spec.Ports[i]
		if port.NodePort != 0 || !wantsNodePorts(r.spec) {
			continue
		}
		if r.creating {
			if port.NodePort = r.twin(port.Port); port.NodePort != 0 {
				continue
			}
		}
		chosen, err := r.choice.NodePort()
		if err != nil {
			return field.Invalid(at("ports").Index(i).Child("nodePort"), port.NodePort, "no port can be had: "+err.Error())
		}
		port.NodePort = chosen
	}
	return nil
}

func (r *portRequest) chooseHealthPort() *field.Error {
	if !r.health || r.spec.HealthCheckNodePort != 0 {
		return nil
	}
	chosen, err := r.choice.NodePort()
	if err != nil {
		return field.Invalid(at("healthCheckNodePort"), 0, "no port can be had: "+err.Error())
	}
	r.spec.HealthCheckNodePort = chosen
	return nil
}

// take gets a port that the user asked for.
func (r *portRequest) take(port int32) error {
	if slices.Contains(r.held, port) || slices.Contains(r.taken, port) {
		return fmt.Errorf("port %d is in use by this very Service, for something else", port)
	}
	if err := r.choice.TakeNodePort(port); err != nil {
		return fmt.Errorf("port %d can't be had: %w", port, err)
	}
	r.taken = append(r.taken, port)
	return nil
}
