package bgp

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	gobgp "github.com/osrg/gobgp/v4/pkg/server"
)

const (
	routerAS = 64500
	// routerConfig is in the environment of a process that is a router.
	routerConfig = "PORTAL_TEST_ROUTER"
)

// setting is what a router is started with.
type setting struct {
	At       netip.AddrPort
	Password string
	PeerAS   uint32
}

// question is what a test asks of a router, and reply the answer.
type (
	question struct{ Op, Addr string }
	reply    struct {
		Routes   []string // prefix, next hop, AS path, communities
		Lost     int      // routes that are gone, since it was asked to watch
		Promises []bool   // for each session that came up since: whether routes may be kept
	}
)

// router is the other side: the same library in a process of its own, because two servers in one share variables of the library's. It waits
// for the speaker, which comes from 127.0.0.1, at an address of its own on loopback.
type router struct {
	t   *testing.T
	at  netip.AddrPort
	in  *json.Encoder
	out *json.Decoder
}

// newRouter starts a router. The speaker's AS is the default unless it is given.
func newRouter(t *testing.T, at, password string, as ...uint32) *router {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(at, "0"))
	if err != nil {
		t.Fatal(err)
	}
	r := &router{t: t, at: netip.MustParseAddrPort(l.Addr().String())}
	l.Close()
	config, err := json.Marshal(setting{r.at, password, append(as, DefaultAS)[0]})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), routerConfig+"="+string(config))
	cmd.Stderr = os.Stderr
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close() // it ends with its questions
		_ = cmd.Wait()
	})
	r.in, r.out = json.NewEncoder(in), json.NewDecoder(out)
	return r
}

func (r *router) ask(op, addr string) (out reply) {
	r.t.Helper()
	if err := r.in.Encode(question{op, addr}); err != nil {
		r.t.Fatal(err)
	}
	if err := r.out.Decode(&out); err != nil {
		r.t.Fatal(err)
	}
	return out
}

func (r *router) routes() []string { return r.ask("routes", "").Routes }

// peer is how the speaker knows the router.
func (r *router) peer() Peer {
	p := newPeer()
	p.Address, p.Port, p.AS, p.LocalAS, p.Source = r.at.Addr(), r.at.Port(), routerAS, DefaultAS, netip.MustParseAddr("127.0.0.1")
	return p
}

// TestMain is a router in the processes that newRouter starts.
func TestMain(m *testing.M) {
	config := os.Getenv(routerConfig)
	if config == "" {
		os.Exit(m.Run())
	}
	if err := beRouter(config); err != nil {
		fmt.Fprintln(os.Stderr, "router:", err)
		os.Exit(1)
	}
}

func beRouter(config string) error {
	var set setting
	if err := json.Unmarshal([]byte(config), &set); err != nil {
		return err
	}
	server := gobgp.NewBgpServer(gobgp.LoggerOption(slog.New(slog.DiscardHandler), nil))
	go server.Serve()
	ctx := context.Background()
	if err := server.StartBgp(ctx, &api.StartBgpRequest{Global: &api.Global{
		Asn: routerAS, RouterId: set.At.Addr().String(), ListenPort: int32(set.At.Port()), ListenAddresses: []string{set.At.Addr().String()},
	}}); err != nil {
		return err
	}
	defer server.Stop()
	p := &api.Peer{
		Conf:            &api.PeerConf{NeighborAddress: "127.0.0.1", PeerAsn: set.PeerAS, AuthPassword: set.Password},
		Transport:       &api.Transport{PassiveMode: true},
		GracefulRestart: &api.GracefulRestart{Enabled: true, RestartTime: 60},
	}
	for _, f := range families {
		p.AfiSafis = append(p.AfiSafis, &api.AfiSafi{Config: &api.AfiSafiConfig{Family: f, Enabled: true}, MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: true}}})
	}
	if err := server.AddPeer(ctx, &api.AddPeerRequest{Peer: p}); err != nil {
		return err
	}
	var mu sync.Mutex
	var seen reply
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var q question
		if err := in.Decode(&q); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		var answer reply
		var err error
		switch q.Op {
		case "routes":
			answer.Routes, err = routesOf(server)
		case "add":
			var foreign *apiutil.Path
			if foreign, err = path(route(q.Addr)); err == nil {
				_, err = server.AddPath(apiutil.AddPathRequest{Paths: []*apiutil.Path{foreign}})
			}
		case "watch":
			err = watch(ctx, server, &mu, &seen)
		case "seen":
			mu.Lock()
			answer = seen
			mu.Unlock()
		}
		if err == nil {
			err = out.Encode(answer)
		}
		if err != nil {
			return err
		}
	}
}

func routesOf(server *gobgp.BgpServer) (out []string, err error) {
	for _, f := range []packet.Family{packet.RF_IPv4_UC, packet.RF_IPv6_UC} {
		err := server.ListPath(apiutil.ListPathRequest{TableType: api.TableType_TABLE_TYPE_GLOBAL, Family: f}, func(prefix packet.NLRI, paths []*apiutil.Path) {
			for _, p := range paths {
				out = append(out, prefix.String()+describe(p))
			}
		})
		if err != nil {
			return nil, err
		}
	}
	slices.Sort(out)
	return out, nil
}

func describe(p *apiutil.Path) (text string) {
	for _, a := range p.Attrs {
		switch a := a.(type) {
		case *packet.PathAttributeNextHop:
			text += " via " + a.Value.String()
		case *packet.PathAttributeMpReachNLRI:
			text += " via " + a.Nexthop.String()
		case *packet.PathAttributeAsPath:
			text += " by " + packet.AsPathString(a)
		case *packet.PathAttributeLocalPref:
			text += fmt.Sprint(" preference ", a.Value)
		case *packet.PathAttributeMultiExitDisc:
			text += fmt.Sprint(" metric ", a.Value)
		case *packet.PathAttributeCommunities, *packet.PathAttributeLargeCommunities:
			text += " " + a.String()
		}
	}
	if p.Stale {
		text += " stale"
	}
	return text
}

// watch counts routes that go, and notes for each session that comes up whether it was begun with the promise that packets were forwarded all the
// time: many routers drop what they have kept without it.
func watch(ctx context.Context, server *gobgp.BgpServer, mu *sync.Mutex, seen *reply) error {
	return server.WatchEvent(ctx, gobgp.WatchEventMessageCallbacks{
		OnBestPath: func(paths []*apiutil.Path, _ time.Time) {
			mu.Lock()
			defer mu.Unlock()
			for _, p := range paths {
				if p.Withdrawal {
					seen.Lost++
				}
			}
		},
		OnPeerUpdate: func(e *apiutil.WatchEventMessage_PeerEvent, _ time.Time) {
			if e.Type != apiutil.PEER_EVENT_STATE || e.Peer.State.SessionState != packet.BGP_FSM_ESTABLISHED {
				return
			}
			kept := 0
			for _, c := range e.Peer.State.RemoteCap {
				if c, ok := c.(*packet.CapGracefulRestart); ok && c.Flags&0x08 != 0 {
					for _, family := range c.Tuples {
						if family.Flags&0x80 != 0 {
							kept++
						}
					}
				}
			}
			mu.Lock()
			defer mu.Unlock()
			seen.Promises = append(seen.Promises, kept == len(families))
		},
	}, gobgp.WatchBestPath(false), gobgp.WatchPeer())
}
