# Portal: `make` lists the targets.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
KUBERNETES := v1.37.1
# The binary and its tests are built the same way, so that they share compiled packages. Without cgo the binary is static and
# leaves out symbol tables for plugins; the tag makes equal managedFields share memory.
export CGO_ENABLED := 0
export GOFLAGS := -tags=fieldsv1string
# The peers are built as their own projects ship them: without cgo.
PEER := env CGO_ENABLED=0 GOFLAGS=
BIN := .cache/bin
PEERS := .cache/peers
E2E := .cache/e2e
CONTAINERD := $(addprefix $(PEERS)/,containerd containerd-shim-runc-v2 ctr)
KUBEFLAGS := -X k8s.io/component-base/version.gitVersion=$(KUBERNETES) -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37
LDFLAGS := -s -w -X main.version=$(VERSION) $(KUBEFLAGS)
OPENAPI_GEN := k8s.io/kube-openapi/cmd/openapi-gen@v0.0.0-20260721132016-d427ff9ee9ad
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
COREDNS := github.com/coredns/coredns@v1.15.0

.PHONY: help
help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z][a-zA-Z_-]*:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: up
up: build ## build and run everything on this machine, in the foreground
	./$(BIN)/portal up

.PHONY: build
build: ## build the binary
	@hack/need go
	@echo "building $(BIN)/portal (the first time takes some minutes)"
	@go build -ldflags "$(LDFLAGS)" -o $(BIN)/portal ./cmd/portal

# ./test takes longest and mostly waits: it begins first, and the others run beside it. Their results are printed when it has ended.
.PHONY: test
test: build $(PEERS)/etcd ## run every test; without root, those that need no root
	@hack/need python3 ip kubectl dig unbound musl-gcc nft iptables conntrack curl bird node npm chromium prometheus promtool
	@[ "$$(id -u)" -ne 0 ] || $(MAKE) --no-print-directory vm $(E2E)/e2e.test $(E2E)/images.yaml
	go vet ./...
	go test -vet=off -timeout 45m ./test ./...

.PHONY: console
console: ## build the console's page from internal/console/ui, as its lock file says
	@hack/need node npm
	@hack/console internal/console/ui/dist

.PHONY: test-console
test-console: build ## use the console in a browser: every page and how soon it changes, the API server restarting, 10,000 Services (CONSOLE_SHOTS=DIR keeps screenshots)
	@hack/need node npm chromium
	GOFLAGS=-tags=fieldsv1string,console go test -vet=off -count=1 -v -run 'Console' -timeout 30m ./test/

.PHONY: race
race: build $(PEERS)/etcd ## run the tests of every package with the race detector
	CGO_ENABLED=1 go test -race -timeout 25m $$(go list ./... | grep -v -e '^portal/test$$' -e '^portal/test/vm$$')

.PHONY: test-peers
test-peers: build peers $(CONTAINERD) $(PEERS)/kube-apiserver-1.30 ## run the real kube-proxy, kube-controller-manager, kubelet with containerd, and CoreDNS against Portal, compare RBAC with kube-apiserver, and run Portal against kube-apiserver 1.30
	@hack/need ip nft iptables busybox unshare nsenter curl runc /usr/lib/cni/ptp
	GOFLAGS=-tags=fieldsv1string,peers go test -vet=off -count=1 -v -run Peers -timeout 30m ./test/...

.PHONY: test-lb-peers
test-lb-peers: $(PEERS)/h2spec ## test the balancer with openssl, nginx and HAProxy, show what these do with 351 doubtful requests, and run h2spec (6 minutes)
	@hack/need openssl nginx haproxy
	GOFLAGS=-tags=fieldsv1string,peers go test -vet=off -count=1 -v -run Peers -timeout 30m ./internal/lb/...

LB_MODES ?= nftables,iptables
.PHONY: test-lb-nodes
test-lb-nodes: build ## restart all balancers and proxies, and lose a node, under 500 requests a second from outside: not one may fail (LB_MODES=nftables,iptables; 5 minutes)
	@hack/need ip nft iptables conntrack
	GOFLAGS=-tags=fieldsv1string,lbnodes go test -vet=off -count=1 -v -run 'LabBalancerNodes' -timeout 30m ./test/ -lb.modes=$(LB_MODES) -lb.rate=500 -lb.rounds=2 -roll.strict

.PHONY: test-e2e-api
test-e2e-api: build $(E2E)/e2e.test ## run Kubernetes' conformance tests that start no container against Portal: see test/e2e/README.md (20 minutes the first time)
	GOFLAGS=-tags=fieldsv1string,e2e go test -vet=off -count=1 -v -run 'Complete|Conformance' -timeout 60m ./test/e2e

E2E_MODES ?= nftables,iptables,userspace
.PHONY: test-e2e
test-e2e: build $(E2E)/e2e.test $(PEERS)/coredns ## run Kubernetes' end-to-end tests that start Pods in a lab of 3 nodes, in turn with each mode of the proxy (E2E_MODES=nftables,iptables,userspace; hours): see test/e2e/README.md
	@hack/need ip nft iptables conntrack bird
	@$(MAKE) --no-print-directory $(E2E)/images.yaml
	GOFLAGS=-tags=fieldsv1string,e2e go test -vet=off -count=1 -v -run 'Complete|Lab' -timeout 6h ./test/e2e -e2e.modes=$(E2E_MODES)

E2E_PROGRAMS := agnhost nonewprivs regression-issue-74839
# The image of agnhost has coredns if that is built: a few tests of `make test-e2e` need it.
$(E2E)/images.yaml: bench/peers/e2e/go.mod test/e2e/pause/main.go hack/e2e-images $(wildcard $(PEERS)/coredns)
	@hack/need go
	@mkdir -p $(E2E)
	@echo "building the programs of the tests' images (this takes minutes)"
	@cd bench/peers/e2e && go build -ldflags "-s -w" -o ../../../$(E2E)/ $(E2E_PROGRAMS:%=k8s.io/kubernetes/test/images/%)
	@go build -ldflags "-s -w" -o $(E2E)/pause ./test/e2e/pause
	@hack/e2e-images $(E2E) "$$(cd bench/peers/e2e && go list -m -f '{{.Dir}}' k8s.io/kubernetes)/test/images"

# It is built as Portal is, so that the two share most of their compiled packages.
$(E2E)/e2e.test: bench/peers/e2e/go.mod
	@hack/need go
	@echo "building $@ (this takes minutes)"
	@cd bench/peers/e2e && go test -c -vet=off -ldflags "-s -w $(KUBEFLAGS)" -o ../../../$@ k8s.io/kubernetes/test/e2e

.PHONY: vm
vm: ## fetch the kernel of the virtual machine for IPVS and SCTP
	@hack/need qemu-system-x86_64 busybox xz
	@[ -e /usr/lib/qemu/virtiofsd ] || [ -e /usr/libexec/virtiofsd ] || hack/need virtiofsd
	@hack/vm-kernel .cache/vm

.PHONY: uml
uml: ## build the user-mode kernel for labs with IPVS (10 minutes the first time)
	@hack/need gcc make flex bison bc perl xz busybox
	@[ -e /usr/include/sys/ptrace.h ] || hack/need libc6-dev
	@hack/vm-uml .cache/vm/uml

.PHONY: test-vm
test-vm: build vm uml ## test IPVS and SCTP in a virtual machine: the modes' suites in full, the recorded conformance (half an hour)
	@hack/need python3 ip nft iptables
	GOFLAGS=-tags=fieldsv1string,vm go test -vet=off -count=1 -v -timeout 70m ./test/vm -vm.long

.PHONY: test-dataplane
test-dataplane: build ## test the 211 further data plane scenarios (test/recorded) in all modes that need no virtual machine
	@hack/need python3 ip nft iptables
	go test -vet=off -count=1 -v -run 'DataplaneMore' -timeout 30m ./test/ -dataplane.modes=nftables,iptables,userspace

TRACE_PAIRS ?= 1000
TRACE_SEED ?= 1
.PHONY: test-trace
test-trace: build uml ## compare portal trace with 1,000 packets between random places, in labs of each mode (TRACE_PAIRS=n, TRACE_SEED=n)
	@hack/need ip nft iptables
	go test -vet=off -count=1 -v -run 'TestTrace$$' -timeout 30m ./test/ -trace.modes=nftables,iptables,userspace -trace.pairs=$(TRACE_PAIRS) -trace.seed=$(TRACE_SEED)
	GOFLAGS=-tags=fieldsv1string,vm go test -vet=off -count=1 -v -run 'TestTrace$$' -timeout 60m ./test/vm -vm.pairs=$(TRACE_PAIRS) -vm.seed=$(TRACE_SEED)

CRASH_ROUNDS ?= 200
.PHONY: crash
crash: build $(PEERS)/etcd ## 200 rounds of kill -9 under load, embedded and external etcd (CRASH_ROUNDS=n)
	go test -vet=off -count=1 -v -run Crash -timeout 60m ./test/ -crash.rounds=$(CRASH_ROUNDS)

FAULT_KILLS ?= 500
FAULT_AWAY ?= 10m
.PHONY: faults
faults: build ## test the proxy under faults: 500 times kill -9, the API gone for 10 minutes, refusals, drift (FAULT_KILLS=n, FAULT_AWAY=t; half an hour)
	@hack/need ip nft iptables
	go test -vet=off -count=1 -v -run 'Faults|Affinity|Drift|ModeSwitch' -parallel 4 -timeout 90m ./test/ -faults.kills=$(FAULT_KILLS) -faults.away=$(FAULT_AWAY)

ROLL_PODS ?= 100
ROLL_MODES ?= nftables,iptables,userspace
.PHONY: test-roll
test-roll: build ## replace 100 Pods behind one Service under 200 requests a second, in each proxy mode: not one may fail (ROLL_PODS=n, ROLL_MODES=…)
	@hack/need ip
	go test -vet=off -count=1 -v -run 'LabRoll' -timeout 60m ./test/ -roll.pods=$(ROLL_PODS) -roll.modes=$(ROLL_MODES) -roll.rate=200 -roll.strict

.PHONY: test-kills
test-kills: build ## kill agents, the server and a node under load, in each proxy mode: other nodes' Pods answer every request (ROLL_MODES=…)
	GOFLAGS=-tags=fieldsv1string,kills go test -vet=off -count=1 -v -run 'LabKills' -timeout 60m ./test/ -roll.modes=$(ROLL_MODES) -roll.rate=200 -roll.strict -kills.pods=30 -kills.away=20s -kills.grace=50s

FAULTS ?=
.PHONY: test-faults
test-faults: build ## inject every fault of the catalogue in a lab: portal explain names the cause, and its fix, typed as printed, works (15 minutes; some of them: FAULTS='faults/(a_typo|no_selector)', FAULTS=nodes)
	@hack/need python3 ip nft iptables conntrack curl openssl
	GOFLAGS=-tags=fieldsv1string,faults go test -vet=off -count=1 -v -parallel 6 -timeout 60m -run 'TestFaults/$(FAULTS)' ./test/faults

FUZZ_TIME ?= 5m
.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZ_TIME (5m) each
	@hack/fuzz $(FUZZ_TIME)

.PHONY: lint
lint: ## gofmt, vet and staticcheck
	@test -z "$$(gofmt -l $$(git ls-files '*.go' | grep -v zz_generated) | tee /dev/stderr)"
	go vet ./...
	go run $(STATICCHECK) ./...

.PHONY: generate
generate: ## write the generated OpenAPI definitions
	go run $(OPENAPI_GEN) --go-header-file /dev/null --report-filename /dev/null \
		--output-dir internal/apiserver/openapi --output-pkg portal/internal/apiserver/openapi --output-file zz_generated.openapi.go \
		k8s.io/api/{core,apps,autoscaling,scheduling,node,discovery,networking,coordination,events,rbac,authorization,authentication,certificates,admissionregistration,flowcontrol,storagemigration,storage,policy,batch}/v1 k8s.io/api/autoscaling/v2 k8s.io/api/scheduling/v1alpha3 k8s.io/kube-aggregator/pkg/apis/apiregistration/v1 \
		k8s.io/apimachinery/pkg/{apis/meta/v1,runtime,version,util/intstr,api/resource}
	gofmt -w internal/apiserver/openapi/zz_generated.openapi.go

BENCH := .cache/bench
BENCHMARKS := api controllers dns lb proxy
.PHONY: bench
bench: ## run every side-by-side measurement, and docs/benchmarks.md from them (an hour; nothing else should run on the machine)
	@missed=0; for one in $(BENCHMARKS); do $(MAKE) --no-print-directory bench-$$one || missed=1; done; \
	go run ./bench/page $(BENCHMARKS:%=$(BENCH)/%.json) && exit $$missed

.PHONY: bench-api
bench-api: build peers ## measure Portal's API server beside kube-apiserver, on the same etcd
	go run ./bench/api -o $(BENCH)/api.json

.PHONY: bench-flood
bench-flood: build ## show what others notice while one user floods the API server with 200 connections (5 minutes)
	go run ./bench/flood

.PHONY: bench-controllers
bench-controllers: build peers ## measure Portal's controllers beside kube-controller-manager
	go run ./bench/controllers -o $(BENCH)/controllers.json

.PHONY: bench-dns
bench-dns: build peers ## measure Portal's DNS beside CoreDNS
	@hack/need dnsperf
	go run ./bench/dns -o $(BENCH)/dns.json

.PHONY: bench-lb
bench-lb: build peers-lb ## measure the load balancer beside nginx, HAProxy, Caddy and Go's ReverseProxy, and its addresses beside node ports (15 minutes)
	@hack/need nginx haproxy wrk h2load curl ip nft
	@[ -e /usr/lib/nginx/modules/ngx_stream_module.so ] || hack/need libnginx-mod-stream
	@mkdir -p $(BENCH)
	go build -o $(BENCH)/lb ./bench/lb
	$(BENCH)/lb -o $(BENCH)/lb.json

.PHONY: bench-reports
bench-reports: build ## measure what reports of 1,000 nodes cost the API server, explain and findings over 10,000 Services, and top at 20,000 new connections a second (25 minutes)
	@hack/need ip nft
	@mkdir -p $(BENCH)
	go build -o $(BENCH)/reports ./bench/reports
	$(BENCH)/reports -o $(BENCH)/reports.json

.PHONY: bench-pods
bench-pods: build ## measure a node: how soon Pods answer, how long 200 of them take to start, the agent's memory, and what is left of them
	go run ./bench/pods -o $(BENCH)/pods.json

.PHONY: bench-proxy
bench-proxy: build peers ## measure Portal's proxy beside kube-proxy, and its userspace mode beside HAProxy
	@hack/need nft iptables conntrack haproxy ip
	go run ./bench/proxy -o $(BENCH)/proxy.json

.PHONY: bench-proxy-ipvs
bench-proxy-ipvs: build peers vm ## measure Portal's IPVS mode beside kube-proxy's, at 1,000 Services, in the virtual machine
	@hack/need nft iptables ipset conntrack ip
	go test -v -run '^$$' -bench '^BenchmarkProxy$$' -benchtime 1x -timeout 60m ./test/vm

.PHONY: bench-proxy-large
bench-proxy-large: build peers ## more of the same: 10,000 Services in the iptables mode, 30,000 in nftables, 5,000 of 50 endpoints, a larger mix (hours)
	@hack/need nft iptables conntrack ip
	@missed=0; \
	go run ./bench/proxy -haproxy=false -mix "" -modes iptables -iptables-services 10000 -services 10,10000 -o $(BENCH)/proxy-iptables.json || missed=1; \
	go run ./bench/proxy -haproxy=false -mix "" -modes nftables -services 10,30000 -o $(BENCH)/proxy-30000.json || missed=1; \
	go run ./bench/proxy -haproxy=false -mix 5000 -modes nftables -services 5000 -endpoints 50 -o $(BENCH)/proxy-endpoints.json || missed=1; \
	exit $$missed

$(PEERS)/etcd: bench/peers/go.mod bench/peers/etcd/main.go
	@hack/need go
	@echo "building $@"
	@cd bench/peers && $(PEER) go build -ldflags "-s -w" -o ../../$@ ./etcd

.PHONY: peers
peers: $(PEERS)/etcd $(PEERS)/kube-apiserver $(PEERS)/kube-controller-manager $(PEERS)/kube-proxy $(PEERS)/kubelet $(PEERS)/runtime $(PEERS)/coredns ## build the real components (10 minutes the first time)

$(PEERS)/kube-%: bench/peers/go.mod
	@echo "building $@ (this takes minutes)"
	@cd bench/peers && $(PEER) go build -ldflags "-s -w $(KUBEFLAGS)" -o ../../$@ k8s.io/kubernetes/cmd/kube-$*

$(PEERS)/kubelet: bench/peers/go.mod
	@echo "building $@ (this takes minutes)"
	@cd bench/peers && $(PEER) go build -ldflags "-s -w $(KUBEFLAGS)" -o ../../$@ k8s.io/kubernetes/cmd/kubelet

$(PEERS)/runtime: bench/peers/go.mod bench/peers/runtime/main.go
	@cd bench/peers && $(PEER) go build -ldflags "-s -w" -o ../../$@ ./runtime

.PHONY: peers-lb
peers-lb: $(PEERS)/caddy $(PEERS)/h2spec

$(PEERS)/caddy: bench/peers-lb/go.mod
	@echo "building $@ (this takes minutes)"
	@cd bench/peers-lb && $(PEER) go build -ldflags "-s -w" -o ../../$@ github.com/caddyserver/caddy/v2/cmd/caddy

$(PEERS)/h2spec: bench/peers-lb/go.mod
	@cd bench/peers-lb && $(PEER) go build -ldflags "-s -w" -o ../../$@ github.com/summerwind/h2spec/cmd/h2spec

$(CONTAINERD): $(PEERS)/%: bench/peers-containerd/go.mod
	@echo "building $@ (this takes minutes)"
	@cd bench/peers-containerd && $(PEER) go build -ldflags "-s -w" -o ../../$@ github.com/containerd/containerd/v2/cmd/$*

# The oldest Kubernetes that Portal's parts work with.
$(PEERS)/kube-apiserver-1.30: bench/peers-1.30/go.mod
	@echo "building $@ (this takes minutes)"
	@cd bench/peers-1.30 && $(PEER) go build -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=v1.30.14 -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=30" -o ../../$@ k8s.io/kubernetes/cmd/kube-apiserver

$(PEERS)/coredns:
	@echo "building $@"
	@GOBIN=$(CURDIR)/$(PEERS) $(PEER) go install -ldflags "-s -w" $(COREDNS)

.PHONY: clean
clean: ## remove what was built
	rm -rf .cache
