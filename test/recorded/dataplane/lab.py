#!/usr/bin/env python3
"""A lab of network namespaces that measures what a Kubernetes Service proxy does to packets.

It knows nothing about how a proxy works (no rule is ever read): it creates Services and
EndpointSlices through the API, sends real traffic from pods, nodes and an external host, and
notes which backend answered and which source address that backend saw.

    lab.py --record golden.json --bin DIR                     record the reference (needs root)
    lab.py --check golden.json --mode nftables --bin DIR      check kube-proxy itself
    lab.py --check golden.json --mode any --bin DIR --proxy 'myproxy --node {node} ...'
    lab.py --check golden.json --api https://127.0.0.1:6443 --token T --proxy '...'

--proxy is run once inside each node's namespace, without a shell. Placeholders: {node},
{kubeconfig}, {mode}, {config} (a KubeProxyConfiguration file written for that node),
{nodeport_addresses} (comma separated, may be empty), {masquerade_all} (true/false), {bin}.
--api is the URL as this machine reaches it ({host} in it becomes 127.0.0.1); the lab relays it
to 172.31.0.1, same port, inside the lab. Without --api, etcd and kube-apiserver from --bin are
run. --bin may also come from $LAB_BIN and the work directory from $LAB_WORK.

The network: 'wire' is a switch; node-a, node-b and ext (an external client) hang off it; each
node has a bridge with its pods behind it. All of it, and every process, is gone at exit. A
scenario is a list of steps: changes to objects, then probes. The record has one result a probe;
where modes differ it has one for each mode, and a note.

A file of scenarios (--scenarios) has "scenarios", "variants" (settings of the proxies, by name) and
"first_service" (by which the lab sees that the proxies are up). A scenario is {"name", "doc",
"variant", "steps"}; a step may have, in the order they happen:
  chatter  probes sent while the change happens, their results not looked at
  stop     nodes whose proxy is stopped      delete  [kind, name] of objects removed
  apply    objects created or merged         start   nodes whose proxy is started
  wait     seconds slept                     settle  seconds given before the first look
  probes   what is measured
A probe is {"from", "to", ...}: from a pod, a node or ext to "ip:port/proto" (tcp, udp, or http
for a health check), n times (24); with "sport" from one fixed source port; "gap" seconds apart;
"ports": backends are named with the port that answered; "count": only the number of different
backends is kept; "to" may be a list of destinations, taken in turn.
"""
import argparse, collections, concurrent.futures, contextlib, ctypes, fnmatch, functools
import itertools, json, os, selectors, shlex, shutil, signal, socket, ssl
import subprocess, sys, tempfile, threading, time, urllib.error, urllib.parse, urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
PORTS = (8080, 8081, 9376)                    # every echo server answers here, TCP and UDP
# Of one attempt. More than the second after which a SYN is sent again: an ICMP refusal that comes
# back while connect() still holds the socket is lost, and only the one of the second SYN counts.
TIMEOUT = 1.6
CONVERGE = 5.0                                # how long a step may take to become as wanted
NODES = ("node-a", "node-b")
ZONES = {"node-a": "zone-a", "node-b": "zone-b"}
CLUSTER_CIDR = "10.244.0.0/16,fd00:244::/32"
WIRE = {"wire": 1, "node-a": 11, "node-b": 12, "ext": 100}
ALIAS = {"node-a": "172.31.0.21", "node-b": "172.31.0.22"}   # a second address of each node
# What ext reaches through node-a: cluster IPs, load balancer IPs, external IPs.
EXT_VIA_A = ("10.96.0.0/16", "203.0.113.0/24", "198.51.100.0/24")
EXT_VIA_A6 = ("fd00:96::/112", "fd00:203::/64", "fd00:198::/64")
PODS = {f"{n}{k}": ("node-" + n, 10 + k) for n in "ab" for k in (1, 2, 3)}
PODS |= {"ca": ("node-a", 21), "cb": ("node-b", 21)}
SPREAD = [f"10.244.2.{k}" for k in range(101, 161)]          # 60 more addresses, all on pod b3

ADDR = {}                                     # name -> list of its addresses, first v4, then v6
for _n, _k in WIRE.items():
    ADDR[_n] = [f"172.31.0.{_k}", f"fd00:31::{_k}"]
for _i, _n in enumerate(NODES, 1):
    ADDR[_n] += [f"10.244.{_i}.1", f"fd00:244:{_i}::1", ALIAS[_n]]
for _n, (_node, _k) in PODS.items():
    _i = NODES.index(_node) + 1
    ADDR[_n] = [f"10.244.{_i}.{_k}", f"fd00:244:{_i}::{_k}"]
OWNER = {a: n for n, addrs in ADDR.items() for a in addrs}


# ---------------------------------------------------------------- the agent, one per namespace
def serve(name):
    """Echo: one line 'name clientip port' for each TCP connection or UDP datagram."""
    sel = selectors.DefaultSelector()
    for port, fam in itertools.product(PORTS, (socket.AF_INET, socket.AF_INET6)):
        tcp = socket.create_server(("", port), family=fam, backlog=1024)
        udp = socket.socket(fam, socket.SOCK_DGRAM)
        if fam == socket.AF_INET6:
            udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        udp.bind(("", port))
        for s in (tcp, udp):
            sel.register(s, selectors.EVENT_READ, port)
    while True:
        for s, port in [(key.fileobj, key.data) for key, _ in sel.select()]:
            with contextlib.suppress(OSError):
                if s.type == socket.SOCK_STREAM:
                    c, peer = s.accept()
                    local = c.getsockname()[0]       # the 60 spread addresses go by address
                    who = local if local in SPREAD else name
                    c.sendall(f"{who} {peer[0]} {port}\n".encode())
                    c.close()
                else:
                    _, peer = s.recvfrom(2048)
                    s.sendto(f"{name} {peer[0]} {port}\n".encode(), peer)


def attempt(host, port, proto, sport):
    """One connection or datagram: (outcome, reply line or None)."""
    fam = socket.AF_INET6 if ":" in host else socket.AF_INET
    s = socket.socket(fam, socket.SOCK_DGRAM if proto == "udp" else socket.SOCK_STREAM)
    try:
        s.settimeout(TIMEOUT)
        if sport:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("", sport))
        s.connect((host, port))
        if proto == "udp":
            with contextlib.suppress(PermissionError):   # dropped here: is an ICMP error coming?
                s.send(b"?")
        if proto == "http":
            s.sendall(f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        data = b""
        while chunk := s.recv(4096):
            data += chunk
            if proto == "udp":
                break
        return ("ok", data.decode()) if data else ("empty", None)
    except ConnectionError:                       # refused or reset
        return "refused", None
    except TimeoutError:
        return "timeout", None
    except OSError as e:
        return "unreachable" if e.errno in (101, 113) else f"error {e.errno}", None
    finally:
        s.close()


def probe(req):
    """Repeat an attempt; stop early when it keeps failing."""
    tries, fails = [], 0
    for k in range(req["n"]):
        host, port, proto = req["to"][k % len(req["to"])]
        tries.append(attempt(host, port, proto, req.get("sport")))
        fails += tries[-1][0] != "ok"
        if fails == 2 or fails == len(tries) and tries[-1][0] == "timeout":
            break
        if req.get("gap"):
            time.sleep(req["gap"])
    return tries


def agent(name):
    """Serve echo, and run the probes asked for on stdin, each in a thread of its own."""
    threading.Thread(target=serve, args=(name,), daemon=True).start()
    lock = threading.Lock()

    def work(req):
        tries = probe(req)
        with lock:
            print(json.dumps({"id": req["id"], "tries": tries}), flush=True)

    print("ready", flush=True)
    for line in sys.stdin:
        threading.Thread(target=work, args=(json.loads(line),), daemon=True).start()
    os._exit(0)


# ---------------------------------------------------------------- processes
LIBC = ctypes.CDLL(None, use_errno=True)


def spawn(argv, log, **kw):
    """Start a process in a group of its own; it dies with us, even if we are killed."""
    with open(log, "ab") as out:
        return subprocess.Popen(argv, stdout=kw.pop("stdout", out), stderr=out,
                                start_new_session=True,
                                preexec_fn=lambda: LIBC.prctl(1, signal.SIGKILL), **kw)


def end(proc):
    """End one process that we started; what is left of its own process group is killed."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(proc.pid, sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            proc.wait(5)


class Agent:
    """The lab's handle on the agent of one namespace."""

    def __init__(self, netns, name, log):
        self.proc = spawn(["ip", "netns", "exec", netns, sys.executable, os.path.abspath(__file__),
                           "--agent", name], log, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True)
        self.waiting, self.ids, self.lock = {}, itertools.count(), threading.Lock()

    def start(self):
        if self.proc.stdout.readline() != "ready\n":
            raise RuntimeError("an agent did not start")
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.proc.stdout:
            msg = json.loads(line)
            self.waiting.pop(msg["id"]).set_result(msg["tries"])

    def ask(self, req):
        fut = concurrent.futures.Future()
        with self.lock:
            req = req | {"id": next(self.ids)}
            self.waiting[req["id"]] = fut
            self.proc.stdin.write(json.dumps(req) + "\n")
            self.proc.stdin.flush()
        return fut


# ---------------------------------------------------------------- the API
class Api:
    PATHS = {"Service": "/api/v1/namespaces/default/services",
             "EndpointSlice": "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices",
             "Node": "/api/v1/nodes"}

    def __init__(self, url, token):
        self.url, self.token = url.replace("{host}", "127.0.0.1").rstrip("/"), token
        self.tls = ssl._create_unverified_context() if url.startswith("https") else None

    def call(self, method, path, body=None, kind="application/json"):
        head = {"Content-Type": kind, "Accept": "application/json"}
        if self.token:
            head["Authorization"] = "Bearer " + self.token
        req = urllib.request.Request(self.url + path, method=method, headers=head,
                                     data=None if body is None else json.dumps(body).encode())
        with urllib.request.urlopen(req, timeout=20, context=self.tls) as r:
            return json.load(r)

    def apply(self, obj):
        """Merge the object into the one of that name, or create it; its status goes with it."""
        path, name = self.PATHS[obj["kind"]], obj["metadata"]["name"]
        merge = "application/merge-patch+json"
        try:
            try:
                self.call("PATCH", f"{path}/{name}", obj, merge)
            except urllib.error.HTTPError as e:
                if e.code != 404:
                    raise
                self.call("POST", path, obj)
            if "status" in obj:
                self.call("PATCH", f"{path}/{name}/status", {"status": obj["status"]}, merge)
        except urllib.error.HTTPError as e:
            raise RuntimeError(f"{obj['kind']} {name}: {e.code} {e.read()[:400]}") from None

    def delete(self, kind, name):
        with contextlib.suppress(urllib.error.HTTPError):         # gone already
            self.call("DELETE", f"{self.PATHS[kind]}/{name}")

    def clear(self):
        """Remove what an earlier run may have left (every object of ours has a name in lab-)."""
        for kind in ("Service", "EndpointSlice"):
            for o in self.call("GET", self.PATHS[kind])["items"]:
                if o["metadata"]["name"].startswith("lab-"):
                    self.delete(kind, o["metadata"]["name"])

    def wait(self, seconds=60):
        stop = time.time() + seconds
        while True:
            try:
                for path in ("/api/v1/namespaces/default", *self.PATHS.values()):
                    self.call("GET", path)
                return
            except OSError:
                if time.time() > stop:
                    raise
            time.sleep(0.3)


def run_api(stack, opts):
    """Run etcd and kube-apiserver from --bin; return (url, token)."""
    d, (peer, client, port) = opts.work, (opts.port - 2, opts.port - 1, opts.port)
    subprocess.run(["openssl", "genrsa", "-out", f"{d}/sa.key", "2048"], check=True, stderr=-3)
    subprocess.run(["openssl", "rsa", "-in", f"{d}/sa.key", "-pubout", "-out", f"{d}/sa.pub"],
                   check=True, stderr=-3)
    with open(f"{d}/tokens.csv", "w") as f:
        f.write('lab-token,admin,1,"system:masters"\n')
    shutil.rmtree(f"{d}/etcd", ignore_errors=True)
    store = f"http://127.0.0.1:{client}"
    etcd = spawn([f"{opts.bin}/etcd", "--data-dir", f"{d}/etcd", "--listen-client-urls", store,
                  "--advertise-client-urls", store, "--unsafe-no-fsync",
                  "--listen-peer-urls", f"http://127.0.0.1:{peer}"], f"{d}/etcd.log")
    stack.callback(end, etcd)
    api = spawn([f"{opts.bin}/kube-apiserver", f"--etcd-servers={store}", f"--secure-port={port}",
                 "--service-cluster-ip-range=10.96.0.0/16,fd00:96::/112",
                 "--bind-address=127.0.0.1", "--advertise-address=172.31.0.1",
                 "--service-account-issuer=https://lab", f"--cert-dir={d}/certs",
                 f"--service-account-key-file={d}/sa.pub", f"--token-auth-file={d}/tokens.csv",
                 f"--service-account-signing-key-file={d}/sa.key",
                 "--authorization-mode=AlwaysAllow", "--endpoint-reconciler-type=none",
                 "--disable-admission-plugins=ServiceAccount"], f"{d}/apiserver.log")
    stack.callback(end, api)
    return f"https://127.0.0.1:{port}", "lab-token"


# ---------------------------------------------------------------- the network
def sh(cmd, data=None):
    r = subprocess.run(shlex.split(cmd), input=data, text=True, capture_output=True)
    if r.returncode:
        raise RuntimeError(f"{cmd}: {r.stderr.strip()}")


def relay(netns, host, port, stack):
    """Offer the API of this machine at 172.31.0.1:port in the lab, byte for byte."""
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{netns}") as there:
        if LIBC.setns(there.fileno(), 0):         # a socket stays in the namespace it was made in
            raise OSError(ctypes.get_errno(), "setns")
        try:
            lst = socket.create_server((ADDR["wire"][0], port), backlog=64)
        finally:
            LIBC.setns(home.fileno(), 0)
    stack.callback(lst.close)

    def pump(a, b):
        with contextlib.suppress(OSError):
            while data := a.recv(65536):
                b.sendall(data)
        for s in (a, b):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def loop():
        with contextlib.suppress(OSError):
            while True:
                c, _ = lst.accept()
                try:
                    up = socket.create_connection((host, port))
                except OSError:
                    c.close()
                    continue
                for pair in ((c, up), (up, c)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=loop, daemon=True).start()


class Lab:
    """The namespaces, their agents and the two proxies; the stack takes them down again."""

    def __init__(self, stack, opts, api, mode, variant):
        self.stack, self.opts, self.api = stack, opts, api
        self.mode, self.variant, self.agents, self.proxies = mode, variant, {}, {}
        self.build_network()
        for n in [*NODES, "ext", *PODS]:
            self.agents[n] = Agent(self.ns(n), n, f"{opts.work}/agent-{n}.log")
            stack.callback(end, self.agents[n].proc)
        for a in self.agents.values():
            a.start()
        url = urllib.parse.urlsplit(api.url)
        port = url.port or (443 if url.scheme == "https" else 80)
        relay(self.ns("wire"), url.hostname, port, stack)
        self.api_url = f"{url.scheme}://{ADDR['wire'][0]}:{port}{url.path}"
        api.clear()
        for i, n in enumerate(NODES, 1):
            api.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": n, "labels": {
                "kubernetes.io/hostname": n, "topology.kubernetes.io/zone": ZONES[n]}},
                "spec": {"podCIDR": f"10.244.{i}.0/24",
                         "podCIDRs": [f"10.244.{i}.0/24", f"fd00:244:{i}::/64"]},
                "status": {"addresses": [{"type": "InternalIP", "address": a} for a in ADDR[n][:2]],
                           "conditions": [{"type": "Ready", "status": "True"}]}})
        stack.callback(lambda: self.stop_proxy(*NODES))
        self.start_proxy(*NODES)
        self.first_service()
        # kube-proxy can miss the zone of its node when it starts (the informer may call before
        # the handler is registered) and sees it only once it changes: change it, and back.
        for z, n in itertools.product(("elsewhere", None), NODES):
            api.apply({"kind": "Node", "metadata": {"name": n, "labels": {
                "topology.kubernetes.io/zone": z or ZONES[n]}}})

    def ns(self, name):
        return f"{self.opts.prefix}-{name}"

    def build_network(self):
        for n in [*WIRE, *PODS]:
            subprocess.run(["ip", "netns", "del", self.ns(n)], stderr=-3)   # a killed run's
            sh(f"ip netns add {self.ns(n)}")
            self.stack.callback(subprocess.run, ["ip", "netns", "del", self.ns(n)], stderr=-3)
            fwd = int(n in NODES)
            keys = {"ipv4/ip_forward": fwd, "ipv6/conf/all/forwarding": fwd,
                    "bridge/bridge-nf-call-iptables": fwd, "bridge/bridge-nf-call-ip6tables": fwd,
                    "ipv4/icmp_ratelimit": 0, "ipv4/icmp_msgs_per_sec": 100000,
                    "ipv4/icmp_msgs_burst": 10000, "ipv6/icmp/ratelimit": 0}  # see every reject
            keys |= {f"{f}/conf/{c}/{k}": 0 for c in ("all", "default") for f, k in (
                ("ipv4", "rp_filter"), ("ipv4", "send_redirects"), ("ipv4", "accept_redirects"),
                ("ipv6", "accept_redirects"), ("ipv6", "accept_ra"), ("ipv6", "accept_dad"))}
            script = "".join(f"[ ! -e /proc/sys/net/{k} ] || echo {v} >/proc/sys/net/{k}\n"
                             for k, v in keys.items())
            sh(f"ip netns exec {self.ns(n)} sh -e", script + "ip link set lo up\n")

        def plug(host, port, guest, dev, addrs):
            """A cable from a switch port in host to the device of guest."""
            sh(f"ip -n {self.ns(host)} link add {port} type veth peer name {dev} "
               f"netns {self.ns(guest)}")
            sh(f"ip -n {self.ns(host)} link set {port} master br0 up")
            if host != "wire":
                sh(f"ip -n {self.ns(host)} link set {port} type bridge_slave hairpin on")
            lines = [f"addr add {a} dev {dev}" + " nodad" * (":" in a) for a in addrs]
            sh(f"ip -n {self.ns(guest)} -batch -", "\n".join([*lines, f"link set {dev} up"]))

        bridge = "link add br0 type bridge forward_delay 0 mcast_snooping 0\n"
        sh(f"ip -n {self.ns('wire')} -batch -", bridge + "addr add 172.31.0.1/24 dev br0\n"
           "addr add fd00:31::1/64 dev br0 nodad\nlink set br0 up\n")
        for n in (*NODES, "ext"):
            plug("wire", n, n, "eth0", [ADDR[n][0] + "/24", ADDR[n][1] + "/64"])
        for i, n in enumerate(NODES, 1):
            sh(f"ip -n {self.ns(n)} -batch -", bridge + f"addr add 10.244.{i}.1/24 dev br0\n"
               f"addr add fd00:244:{i}::1/64 dev br0 nodad\nlink set br0 up\n"
               f"addr add {ALIAS[n]}/32 dev lo\n"
               f"route add default via 172.31.0.1\nroute add default via fd00:31::1\n")
        for n, (node, _) in PODS.items():
            i = NODES.index(node) + 1
            more = [a + "/32" for a in SPREAD] if n == "b3" else []
            plug(node, "p-" + n, n, "eth0", [ADDR[n][0] + "/24", ADDR[n][1] + "/64", *more])
            sh(f"ip -n {self.ns(n)} -batch -",
               f"route add default via 10.244.{i}.1\nroute add default via fd00:244:{i}::1\n")
        for n in (*NODES, "ext"):                 # the way to the pods of (other) nodes
            lines = [f"route add {net} via {ADDR[m][f]}" for i, m in enumerate(NODES, 1) if m != n
                     for f, net in enumerate((f"10.244.{i}.0/24", f"fd00:244:{i}::/64"))]
            lines += [f"route add {ALIAS[m]} via {ADDR[m][0]}" for m in NODES if m != n]
            if n == "ext":
                lines += [f"route add {net} via {ADDR['node-a'][0]}" for net in EXT_VIA_A]
                lines += [f"route add {net} via {ADDR['node-a'][1]}" for net in EXT_VIA_A6]
            sh(f"ip -n {self.ns(n)} -batch -", "\n".join(lines))

    def start_proxy(self, *nodes):
        v = self.variant
        for n in nodes:
            kubeconfig, config = f"{self.opts.work}/{n}.kubeconfig", f"{self.opts.work}/{n}.config"
            with open(kubeconfig, "w") as f:      # JSON is YAML
                json.dump({"apiVersion": "v1", "kind": "Config", "current-context": "lab",
                           "clusters": [{"name": "lab", "cluster": {
                               "server": self.api_url, **({"insecure-skip-tls-verify": True}
                                                          if self.api.tls else {})}}],
                           "users": [{"name": "lab", "user": {"token": self.api.token or ""}}],
                           "contexts": [{"name": "lab", "context": {"cluster": "lab",
                                                                    "user": "lab"}}]}, f)
            sync = {"minSyncPeriod": "20ms", "masqueradeAll": v.get("masqueradeAll", False)}
            with open(config, "w") as f:
                json.dump({"apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
                           "kind": "KubeProxyConfiguration", "mode": self.mode,
                           "clientConnection": {"kubeconfig": kubeconfig, "qps": 100, "burst": 200},
                           "clusterCIDR": CLUSTER_CIDR, "hostnameOverride": n,
                           "iptables": sync, "nftables": sync,
                           "nodePortAddresses": v.get("nodePortAddresses"),
                           "metricsBindAddress": "127.0.0.1:10249",
                           "conntrack": {"maxPerCore": 0, "min": 0}}, f)
            fill = {"node": n, "kubeconfig": kubeconfig, "config": config, "mode": self.mode,
                    "bin": self.opts.bin, "masquerade_all": str(sync["masqueradeAll"]).lower(),
                    "nodeport_addresses": ",".join(v.get("nodePortAddresses") or [])}
            argv = [w.format(**fill) for w in shlex.split(self.opts.proxy)]
            self.proxies[n] = spawn(["ip", "netns", "exec", self.ns(n), *argv],
                                    f"{self.opts.work}/proxy-{n}.log")

    def stop_proxy(self, *nodes):
        for n in nodes:
            if n in self.proxies:
                end(self.proxies.pop(n))

    def first_service(self):
        """Wait until both proxies serve anything at all, in both families."""
        objs, checks = self.opts.data["first_service"]
        stop = time.time() + 30 * self.opts.slow
        for o in objs:
            self.api.apply(o)
        while not all(self.result(p, self.ask(p))["outcome"] == "ok" for p in checks):
            if time.time() > stop:
                raise RuntimeError(f"the proxy serves nothing; see {self.opts.work}/proxy-*.log")
            time.sleep(0.2)

    def ask(self, p):
        to = []
        for dst in p["to"] if isinstance(p["to"], list) else [p["to"]]:
            addr, proto = dst.rsplit("/", 1)
            host, port = addr.rsplit(":", 1)
            to.append((host.strip("[]"), int(port), proto))
        return self.agents[p["from"]].ask({"to": to, "n": p.get("n", 24), "gap": p.get("gap"),
                                           "sport": p.get("sport")})

    def result(self, p, future):
        """Normalise the attempts of a probe."""
        tries = future.result(timeout=120)
        seen = sorted({o for o, _ in tries})
        if seen != ["ok"]:
            return {"outcome": "+".join(seen)}
        if p["to"][-5:] == "/http":
            head, _, body = tries[0][1].partition("\r\n\r\n")
            try:
                local = json.loads(body).get("localEndpoints")
            except json.JSONDecodeError:
                local = None
            return {"outcome": "ok", "status": int(head.split()[1]), "localEndpoints": local}
        lines = [reply.split() for _, reply in tries]
        backends = sorted({f"{b}:{port}" if p.get("ports") else b for b, _, port in lines})
        if p.get("count"):                        # how many, whichever they are
            return {"outcome": "ok", "backends": len(backends)}
        return {"outcome": "ok", "backends": backends,
                "sources": sorted({self.source(p["from"], a) for _, a, _ in lines})}

    @staticmethod
    def source(origin, addr):
        """client: its own address; node-a, node-b: masqueraded (or a node is the client)."""
        who = OWNER.get(addr)
        return who if who in NODES else "client" if who == origin else "other"

    def scenario(self, sc, wants):
        """Run one scenario: {probe id: result}. With wants, poll until they are met."""
        made, out, recording = {}, {}, wants is None
        try:
            for k, step in enumerate(sc["steps"]):
                chatter = [self.ask(p) for p in step.get("chatter", ())]
                self.stop_proxy(*step.get("stop", ()))
                for kind, name in step.get("delete", ()):
                    self.api.delete(kind, name)
                for obj in step.get("apply", ()):
                    made[obj["kind"], obj["metadata"]["name"]] = 1
                    self.api.apply(obj)
                self.start_proxy(*step.get("start", ()))
                time.sleep(step.get("wait", 0))
                ids = [f"{k}.{j} {p['from']} > " + (p["to"] if isinstance(p["to"], str) else
                       "|".join(p["to"])) for j, p in enumerate(step.get("probes", ()))]
                want = {i: None if recording else wants.get(i, []) for i in ids}
                # Nothing tells "not yet" from "never", so failures are given time to be replaced.
                hopeful = any(w["outcome"] == "ok" for ws in want.values() for w in ws or ())
                time.sleep(step.get("settle", 0.1 if hopeful else 1.2) if not recording
                           else max(2.0, step.get("settle", 0)))
                for c in chatter:
                    c.result(timeout=120)
                stop = time.time() + CONVERGE
                for rounds in itertools.count(1):
                    asked = [(i, p, self.ask(p)) for i, p in zip(ids, step.get("probes", ()))]
                    got = {i: self.result(p, f) for i, p, f in asked}
                    if recording or all(meets(got[i], want[i]) for i in ids) or (
                            rounds > 1 and time.time() > stop):
                        break
                    time.sleep(0.2)
                out.update(got)
        finally:
            for kind, name in made:
                self.api.delete(kind, name)
        return out


def meets(got, wants):
    """Does a result match one of the wanted ones? A wanted '*' matches anything; no want, all."""
    return not wants or any(all(v == "*" or got.get(k) == v for k, v in w.items()) for w in wants)


# ---------------------------------------------------------------- running and comparing
def run_all(opts, api, mode, wants):
    """Every chosen scenario in one mode: {scenario: {probe id: result}}."""
    out, begun = {}, time.time()
    chosen = [s for s in opts.data["scenarios"]
              if any(fnmatch.fnmatch(s["name"], glob) for glob in opts.only.split(","))]
    groups = collections.defaultdict(list)
    for s in chosen:
        groups[s["variant"]].append(s)
    for variant, scs in groups.items():
        conf = opts.data["variants"][variant]
        with contextlib.ExitStack() as stack:
            try:
                lab, broken = Lab(stack, opts, api, mode, conf), None
            except RuntimeError as e:
                broken = e

            def one(s):
                t = time.time()
                try:
                    if broken:
                        raise broken
                    got = lab.scenario(s, None if wants is None else wants.get(s["name"], {}))
                except Exception as e:
                    got = {"error": f"{type(e).__name__}: {e}"}
                if opts.verbose:
                    print(f"  {s['name']} {time.time() - t:.1f} s", flush=True)
                return s["name"], got

            with concurrent.futures.ThreadPoolExecutor(conf.get("jobs", opts.jobs)) as pool:
                out.update(pool.map(one, scs))
    print(f"# {mode}: {len(chosen)} scenarios in {time.time() - begun:.0f} s", flush=True)
    return out


def merge_runs(a, b):
    """Two results of one probe: the same, loosened where they differ, or None when hopeless."""
    if not a or not b or a["outcome"] != b["outcome"] or "+" in a["outcome"]:
        return None
    return {k: v if b.get(k) == v else "*" for k, v in a.items()}


def record(opts, api):
    modes, golden = opts.mode.split(","), {"scenarios": {}}
    if opts.only != "*" and os.path.exists(opts.record):          # record a part anew
        with open(opts.record) as f:
            golden = json.load(f)
    golden |= {"about": "what kube-proxy did, by lab.py --record", "modes": modes}
    golden |= {"version": opts.label} if opts.label else {}
    runs = {m: [run_all(opts, api, m, None) for _ in range(opts.runs)] for m in modes}
    for s, probes in runs[modes[0]][0].items():
        entry = golden["scenarios"][s] = {}
        errors = {r[s]["error"] for m in modes for r in runs[m] if "error" in r[s]}
        if errors:
            print(f"ERROR {s}:", *errors)
            continue
        for i in probes:
            got = {m: functools.reduce(merge_runs, [r[s].get(i) for r in runs[m]]) for m in modes}
            for m, g in got.items():
                if g is None or "*" in g.values():
                    print(f"FLAKY {m} {s}: {i}", *(r[s].get(i) for r in runs[m]), sep="\n     ")
            if None in got.values():
                continue                                          # flaky in its outcome: dropped
            if all(g == got[modes[0]] for g in got.values()):
                entry[i] = {"want": got[modes[0]]}
            else:
                entry[i] = {"want_by_mode": got, "note": "the modes differ"}
    order = [s["name"] for s in opts.data["scenarios"]]
    kept = golden["scenarios"] = {s: golden["scenarios"].get(s, {}) for s in order}
    with open(opts.record, "w") as f:
        f.write(one_line_each(golden))
    print(f"{len(kept)} scenarios, {sum(map(len, kept.values()))} probes recorded")


def one_line_each(golden):
    """JSON with one probe a line, so that a change of the record can be read."""
    head = {k: v for k, v in golden.items() if k != "scenarios"}
    body = ",\n".join("%s: {\n%s}" % (json.dumps(s), ",\n".join(
        f"  {json.dumps(i)}: {json.dumps(w)}" for i, w in ps.items()))
        for s, ps in golden["scenarios"].items())
    return json.dumps(head)[:-1] + ',\n"scenarios": {\n' + body + "\n}}\n"


def wanted(golden, mode, any_source=False):
    """{scenario: {probe id: [acceptable results]}}; in a mode not recorded, what any mode does."""
    def of(w):
        by_mode = w.get("want_by_mode") or {mode: w["want"]}
        some = [by_mode[mode]] if mode in by_mode else list(by_mode.values())
        return [x | {"sources": "*"} if any_source and "sources" in x else x for x in some]
    return {s: {i: of(w) for i, w in ps.items()} for s, ps in golden["scenarios"].items()}


def check(opts, api):
    with open(opts.check) as f:
        wants = wanted(json.load(f), opts.mode, opts.any_source)
    opts.data["scenarios"] = [s for s in opts.data["scenarios"] if s["name"] in wants]
    got = run_all(opts, api, "nftables" if opts.mode == "any" else opts.mode, wants)
    passed = failed = 0
    for s, results in got.items():
        for i, want in wants.get(s, {}).items():
            if i in results and meets(results[i], want):
                passed += 1
                continue
            failed += 1
            print(f"FAIL {s}: {i}\n     want {' or '.join(map(json.dumps, want))}\n"
                  f"     got  {json.dumps(results.get(i, results.get('error')))}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    ap.add_argument("--agent", help=argparse.SUPPRESS)
    ap.add_argument("--record", metavar="FILE", help="record what the proxy does")
    ap.add_argument("--check", metavar="FILE", help="compare what the proxy does with a record")
    ap.add_argument("--mode", help="nftables, iptables, any (to check); a list (to record)")
    ap.add_argument("--any-source", action="store_true",
                    help="don't compare the source address that backends see (a userspace proxy hides it)")
    ap.add_argument("--slow", type=float, default=1, metavar="FACTOR",
                    help="stretch time-outs, for an emulated machine")
    ap.add_argument("--proxy", metavar="CMD", default="{bin}/kube-proxy --config {config} -v 2")
    ap.add_argument("--api", metavar="URL", help="an API server already running")
    ap.add_argument("--token", default="", help="bearer token for --api")
    ap.add_argument("--port", type=int, default=26443, help="of the API server that the lab runs")
    ap.add_argument("--bin", default=os.environ.get("LAB_BIN", ""), help="where the binaries are")
    ap.add_argument("--work", default=os.environ.get("LAB_WORK"), help="keep logs here")
    ap.add_argument("--scenarios", default=os.path.join(HERE, "scenarios.json"))
    ap.add_argument("--only", default="*", metavar="GLOB,..", help="scenarios by name")
    ap.add_argument("--jobs", type=int, default=6, help="scenarios at once")
    ap.add_argument("--runs", type=int, default=2, help="recordings to compare, for each mode")
    ap.add_argument("--label", default="", help="version recorded with the results")
    ap.add_argument("--prefix", default="dp", help="of the namespaces' names")
    ap.add_argument("-v", "--verbose", action="store_true")
    opts = ap.parse_args()
    global TIMEOUT, CONVERGE
    TIMEOUT *= float(os.environ.get("LAB_SLOW", opts.slow))
    CONVERGE *= opts.slow
    os.environ["LAB_SLOW"] = str(opts.slow)       # the agents, which are this program too, read it
    if opts.agent:
        return agent(opts.agent)
    if bool(opts.record) == bool(opts.check):
        ap.error("one of --record and --check is needed")
    opts.mode = opts.mode or ("nftables,iptables" if opts.record else "nftables")
    with open(opts.scenarios) as file:
        opts.data = json.load(file)
    for sig in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as stack:
        if opts.work:
            os.makedirs(opts.work, exist_ok=True)
        else:
            opts.work = stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-"))
        url, token = (opts.api, opts.token) if opts.api else run_api(stack, opts)
        api = Api(url, token)
        api.wait()
        return record(opts, api) if opts.record else check(opts, api)


if __name__ == "__main__":
    sys.exit(main())
