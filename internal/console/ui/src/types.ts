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

export interface Event {
  type: string;
  reason: string;
  message: string;
  count: number;
  last: string;
  from?: string;
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
  events?: Event[];
  findings?: Finding[];
  status: Status;
  hidden?: string[];
}
