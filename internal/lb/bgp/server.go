package bgp

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	gobgp "github.com/osrg/gobgp/v4/pkg/server"
)

// server is the library's, in terms of peers and addresses.
type server struct {
	bgp      *gobgp.BgpServer
	watching context.CancelFunc
	stopping *atomic.Bool
}

// families are what every session is for.
var families = []*api.Family{
	{Afi: api.Family_AFI_IP, Safi: api.Family_SAFI_UNICAST},
	{Afi: api.Family_AFI_IP6, Safi: api.Family_SAFI_UNICAST},
}

// The policies: only what this side announces is taken in and passed on, whatever peers send, and with the next hop that is right for a peer.
const importPolicy, exportPolicy = "own", "next-hops"

// start starts the library's server without any listener. It calls changed when a session comes up or is lost, and heard when something happens
// that may be why.
func start(as uint32, id netip.Addr, log *slog.Logger, changed func(peer netip.Addr, up bool), heard func(peer netip.Addr, what string)) (*server, error) {
	watching, cancel := context.WithCancel(context.Background())
	s := &server{stopping: &atomic.Bool{}, watching: cancel}
	s.bgp = gobgp.NewBgpServer(gobgp.LoggerOption(slog.New(&listener{out: log.Handler(), stopping: s.stopping, heard: heard}), nil))
	go s.bgp.Serve() // until StopBgp
	if err := s.configure(watching, as, id, changed); err != nil {
		s.stop(false)
		return nil, fmt.Errorf("start BGP: %w", err)
	}
	return s, nil
}

func (s *server) configure(ctx context.Context, as uint32, id netip.Addr, changed func(peer netip.Addr, up bool)) error {
	if err := s.bgp.StartBgp(ctx, &api.StartBgpRequest{Global: &api.Global{Asn: as, RouterId: id.String(), ListenPort: -1}}); err != nil {
		return err
	}
	return s.bgp.WatchEvent(ctx, gobgp.WatchEventMessageCallbacks{OnPeerUpdate: func(e *apiutil.WatchEventMessage_PeerEvent, _ time.Time) {
		if e.Type != apiutil.PEER_EVENT_STATE || s.stopping.Load() {
			return
		}
		if state := e.Peer.State; state.SessionState == packet.BGP_FSM_ESTABLISHED || state.SessionState == packet.BGP_FSM_IDLE {
			changed(state.NeighborAddress, state.SessionState == packet.BGP_FSM_ESTABLISHED)
		}
	}}, gobgp.WatchPeer())
}

// stop ends all sessions. Peers that keep routes for a restart do so if keep is set, and if not, drop them at once.
func (s *server) stop(keep bool) {
	s.stopping.Store(true)
	s.watching()
	_ = s.bgp.StopBgp(context.Background(), &api.StopBgpRequest{AllowGracefulRestart: keep})
	s.bgp.Stop() // BFD
}

// path is the library's form of a route. The next hop is replaced for each peer.
func path(r Route) (*apiutil.Path, error) {
	prefix, err := packet.NewIPAddrPrefix(netip.PrefixFrom(r.Addr, r.Addr.BitLen()))
	if err != nil {
		return nil, err
	}
	out := &apiutil.Path{Family: packet.RF_IPv4_UC, Nlri: prefix, Attrs: []packet.PathAttributeInterface{packet.NewPathAttributeOrigin(packet.BGP_ORIGIN_ATTR_TYPE_IGP)}}
	var hop packet.PathAttributeInterface
	if r.Addr.Is4() {
		hop, err = packet.NewPathAttributeNextHop(netip.AddrFrom4([4]byte{192, 0, 2, 1}))
	} else {
		out.Family = packet.RF_IPv6_UC
		hop, err = packet.NewPathAttributeMpReachNLRI(packet.RF_IPv6_UC, []packet.PathNLRI{{NLRI: prefix}}, netip.MustParseAddr("2001:db8::1"))
	}
	if err != nil {
		return nil, err
	}
	out.Attrs = append(out.Attrs, hop)
	if r.Metric != 0 {
		out.Attrs = append(out.Attrs, packet.NewPathAttributeMultiExitDisc(r.Metric))
	}
	if r.LocalPreference != nil {
		out.Attrs = append(out.Attrs, packet.NewPathAttributeLocalPref(*r.LocalPreference))
	}
	if len(r.Communities) > 0 {
		out.Attrs = append(out.Attrs, packet.NewPathAttributeCommunities(r.Communities))
	}
	if len(r.LargeCommunities) > 0 {
		var large []*packet.LargeCommunity
		for _, c := range r.LargeCommunities {
			large = append(large, &packet.LargeCommunity{ASN: c[0], LocalData1: c[1], LocalData2: c[2]})
		}
		out.Attrs = append(out.Attrs, packet.NewPathAttributeLargeCommunities(large))
	}
	return out, nil
}

func (s *server) announce(r Route) error {
	p, err := path(r)
	if err == nil {
		_, err = s.bgp.AddPath(apiutil.AddPathRequest{Paths: []*apiutil.Path{p}})
	}
	if err != nil {
		return fmt.Errorf("announce %s: %w", r.Addr, err)
	}
	return nil
}

func (s *server) withdraw(a netip.Addr) error {
	p, err := path(Route{Addr: a})
	if err == nil {
		err = s.bgp.DeletePath(apiutil.DeletePathRequest{Paths: []*apiutil.Path{p}})
	}
	if err != nil {
		return fmt.Errorf("withdraw %s: %w", a, err)
	}
	return nil
}

// nextHops sets what each peer gets as next hop: routes of a family for which it has none are not announced to it.
func (s *server) nextHops(peers map[netip.Addr]NextHops) error {
	request := &api.SetPoliciesRequest{}
	accept := func(name string, c *api.Conditions, hop *api.NexthopAction) *api.Statement {
		c.RouteType = api.Conditions_ROUTE_TYPE_LOCAL
		return &api.Statement{Name: name, Conditions: c, Actions: &api.Actions{RouteAction: api.RouteAction_ROUTE_ACTION_ACCEPT, Nexthop: hop}}
	}
	policy := &api.Policy{Name: exportPolicy}
	for a, n := range peers {
		set := "peer-" + strings.ReplaceAll(a.String(), ":", "_")
		request.DefinedSets = append(request.DefinedSets, &api.DefinedSet{
			DefinedType: api.DefinedType_DEFINED_TYPE_NEIGHBOR, Name: set, List: []string{netip.PrefixFrom(a, a.BitLen()).String()},
		})
		for i, hop := range []netip.Addr{n.V4, n.V6} {
			if !hop.IsValid() {
				continue
			}
			policy.Statements = append(policy.Statements, accept(fmt.Sprint(set, "-", i), &api.Conditions{
				NeighborSet: &api.MatchSet{Type: api.MatchSet_TYPE_ANY, Name: set}, AfiSafiIn: []*api.Family{families[i]},
			}, &api.NexthopAction{Address: hop.String()}))
		}
	}
	slices.SortFunc(policy.Statements, func(x, y *api.Statement) int { return strings.Compare(x.Name, y.Name) })
	request.Policies = []*api.Policy{policy, {Name: importPolicy, Statements: []*api.Statement{accept(importPolicy, &api.Conditions{}, nil)}}}
	ctx := context.Background()
	if err := s.bgp.SetPolicies(ctx, request); err != nil {
		return fmt.Errorf("set next hops: %w", err)
	}
	for name, direction := range map[string]api.PolicyDirection{importPolicy: api.PolicyDirection_POLICY_DIRECTION_IMPORT, exportPolicy: api.PolicyDirection_POLICY_DIRECTION_EXPORT} {
		err := s.bgp.SetPolicyAssignment(ctx, &api.SetPolicyAssignmentRequest{Assignment: &api.PolicyAssignment{
			Name: "global", Direction: direction, Policies: []*api.Policy{{Name: name}}, DefaultAction: api.RouteAction_ROUTE_ACTION_REJECT,
		}})
		if err != nil {
			return fmt.Errorf("set next hops: %w", err)
		}
	}
	return nil
}

// connectRetry is how often a session is tried, in seconds.
const connectRetry = 3

// add begins a session.
func (s *server) add(n Peer) error {
	p := &api.Peer{
		Conf:   &api.PeerConf{NeighborAddress: n.Address.String(), PeerAsn: n.AS, LocalAsn: n.LocalAS, AuthPassword: string(n.Password)},
		Timers: &api.Timers{Config: &api.TimersConfig{ConnectRetry: connectRetry, HoldTime: uint64(n.HoldTime / time.Second), KeepaliveInterval: uint64(n.HoldTime / time.Second / 3)}},
		// Only the session that this side opens is used, so nothing has to listen.
		Transport: &api.Transport{RemotePort: uint32(n.Port)},
	}
	if n.Source.IsValid() {
		p.Transport.LocalAddress = n.Source.String()
	}
	if n.Multihop > 0 {
		p.EbgpMultihop = &api.EbgpMultihop{Enabled: true, MultihopTtl: uint32(n.Multihop)}
	}
	if n.Restart > 0 {
		// Every session counts as one after a restart: what forwards packets, the proxy's rules, does not end with this process, so
		// the peer may keep what it has until it was sent all routes. These don't depend on others, and wait for nobody's.
		p.GracefulRestart = &api.GracefulRestart{Enabled: true, RestartTime: uint32(n.Restart / time.Second), DeferralTime: 1, LocalRestarting: true}
	}
	if n.BFD > 0 {
		interval := uint32(n.BFD / time.Microsecond)
		p.Bfd = &api.BfdPeerConfig{Enabled: true, DesiredMinimumTxInterval: interval, RequiredMinimumReceive: interval, DetectionMultiplier: bfdMultiplier}
	}
	for _, f := range families {
		p.AfiSafis = append(p.AfiSafis, &api.AfiSafi{
			Config: &api.AfiSafiConfig{Family: f, Enabled: true}, MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: n.Restart > 0}},
		})
	}
	if err := s.bgp.AddPeer(context.Background(), &api.AddPeerRequest{Peer: p}); err != nil {
		return fmt.Errorf("add peer %s: %w", n.Address, err)
	}
	return nil
}

// resend has a peer get all routes again, if it has a session.
func (s *server) resend(a netip.Addr) error {
	if err := s.bgp.ResetPeer(context.Background(), &api.ResetPeerRequest{Address: a.String(), Soft: true, Direction: api.ResetPeerRequest_DIRECTION_OUT}); err != nil {
		return fmt.Errorf("send routes to %s again: %w", a, err)
	}
	return nil
}

// remove ends a session, and the peer drops its routes.
func (s *server) remove(a netip.Addr) error {
	if err := s.bgp.DeletePeer(context.Background(), &api.DeletePeerRequest{Address: a.String()}); err != nil {
		return fmt.Errorf("remove peer %s: %w", a, err)
	}
	return nil
}
