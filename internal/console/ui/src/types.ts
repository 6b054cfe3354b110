// What the server sends: see rows.go, stream.go and detail.go.

export type Health = "ok" | "warning" | "broken" | "unknown";

export interface Port {
  name?: string;
  protocol: string;
  port: number;
  target?: string;
  nodePort?: number;
}

export interface Service {
  ns: string;
  name: string;
  type: string;
  ips?: string[];
  external?: string[];
  lb?: string[];
  cname?: string;
  ports?: Port[];
  healthPort?: number;
  created: string;
  ready: number;
  total: number;
  zones?: string[];
  health: Health;
  stage?: "name" | "address" | "endpoints" | "nodes";
  problem?: string;
}

export interface Node {
  name: string;
  ready: boolean;
  reason?: string;
  zone?: string;
  addresses?: string[];
  cordoned?: boolean;
  endpoints: number;
}

export interface Status {
  synced: boolean;
  namespaces: string[] | null;
  all: boolean;
  awaySince?: string;
  away?: string;
  signedOut?: boolean;
  limits?: string[];
  ranges?: string[];
  nodePorts: string;
  nodePortsKnown: boolean;
}

export interface Change {
  feed: string;
  rev: number;
  reset?: boolean;
  services?: Service[];
  goneServices?: string[];
  nodes?: Node[];
  goneNodes?: string[];
  status?: Status;
}

export interface Endpoint {
  address: string;
  ports?: string[];
  node?: string;
  zone?: string;
  pod?: string;
  ready: boolean;
  serving: boolean;
  terminating?: boolean;
}

export interface Pod {
  name: string;
  phase: string;
  ready: boolean;
  reason?: string;
  node?: string;
  ip?: string;
  terminating?: boolean;
}

export interface Moment {
  time: string;
  from: "endpoints" | "pods" | "events" | "service";
  kind: "good" | "bad" | "neutral";
  what: string;
  reason?: string;
  count?: number;
}

export interface Finding {
  severity: "broken" | "degraded" | "notice";
  verdict: string;
  evidence?: string[];
  fix?: string[];
}

export interface Detail {
  found: boolean;
  service: Service;
  selector?: string;
  headless?: boolean;
  policies?: { name: string; value: string; means: string }[];
  endpoints?: Endpoint[];
  more?: number;
  nodes?: Node[];
  pods?: Pod[];
  timeline?: Moment[];
  since?: string;
  findings?: Finding[];
  /** unexplained is why there are no findings. */
  unexplained?: string;
  status: Status;
  hidden?: string[];
}

export interface Rates {
  new: number;
  open: number;
  bytes: number;
  resets: number;
  p50?: number;
  p99?: number;
}

export interface Collected {
  at: string;
  every: number;
  nodes: number;
  of: number;
  missing?: string;
  notes?: string[];
  bytes: boolean;
  latency: boolean;
}

export interface OverviewTraffic extends Collected {
  services: Record<string, [number, number, number, number]>;
}

export interface ServiceTraffic extends Collected {
  rates: Rates;
  endpoints: Record<string, Rates>;
}

export interface TraceAnswer {
  from: string;
  to: string;
  verdict: string;
  good: boolean;
  reason: string;
  mode: string;
  steps: { node?: string; kind: string; text: string }[] | null;
  ends?: { odds: string; text: string }[];
  more?: number;
  assumptions?: string[];
  text: string;
  command: string;
}
