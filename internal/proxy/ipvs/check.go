package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// inTurn is how many servers have their endpoints looked at in one Check: a look at each of thousands costs too much.
const inTurn = 32

// Check compares what the kernel has with what was programmed, and removes what has drained.
func (b *balancer) Check(context.Context) error {
	if b.lost || b.desired == nil {
		return errors.New("nothing has been acknowledged yet")
	}
	if err := b.sweep(); err != nil {
		return err
	}
	for _, want := range b.settings() {
		if have, err := b.kernel.sysctl.get(want.name); err != nil || have != want.value {
			return fmt.Errorf("net/%s is %q instead of %s", want.name, have, want.value)
		}
	}
	if err := b.checkAddresses(); err != nil {
		return err
	}
	if err := b.checkServers(); err != nil {
		return err
	}
	return b.kernel.rules.check()
}

func (b *balancer) checkAddresses() error {
	held, err := b.kernel.device.list()
	if err != nil {
		return err
	}
	if !maps.Equal(held, b.held) {
		return fmt.Errorf("%s has %d addresses, and not those it was given, which are %d", deviceName, len(held), len(b.held))
	}
	if err := b.kernel.device.routed(b.facts.Families); err != nil {
		return err
	}
	for a := range b.foreign {
		if still, err := b.kernel.device.elsewhere(a); err != nil || !still {
			return fmt.Errorf("the address %v is no longer on another device", a)
		}
	}
	return nil
}

func (b *balancer) checkServers() error {
	now, err := b.kernel.director.servers()
	if err != nil {
		return err
	}
	for at, s := range b.have {
		if n := now[at]; n == nil || !n.same(s) {
			return fmt.Errorf("the virtual server %v has been changed or removed", at)
		}
	}
	keys := slices.SortedFunc(maps.Keys(b.have), key.compare)
	for range min(inTurn, len(keys)) {
		b.turn = (b.turn + 1) % len(keys)
		at := keys[b.turn]
		dests, err := b.kernel.director.dests(at)
		if err != nil {
			return err
		}
		for to, d := range b.have[at].dests {
			if n := dests[to]; n == nil || n.weight != d.weight {
				return fmt.Errorf("the endpoint %v of the virtual server %v has been changed or removed", to, at)
			}
		}
		if len(dests) != len(b.have[at].dests) {
			return fmt.Errorf("the virtual server %v has an endpoint that it was not given", at)
		}
	}
	return nil
}
