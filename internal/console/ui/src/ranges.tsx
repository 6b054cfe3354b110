// The address and port ranges as a map: 256 cells, each of which opens to 256 of its own.
import { useEffect, useMemo } from "preact/hooks";
import { count } from "./format";
import { useWorld, world } from "./live";
import { href, Link } from "./router";

/** Space is a range that numbers are taken from. */
interface Space {
  /** id is what the address of the page has for it. */
  id: string;
  title: string;
  first: bigint;
  size: bigint;
  text: (n: bigint) => string;
  taken: { at: bigint; ns: string; name: string; what: string }[];
}

export function parseAddress(text: string): { value: bigint; v6: boolean } | undefined {
  if (!text.includes(":")) {
    const parts = text.split(".").map(Number);
    if (parts.length !== 4 || parts.some((p) => !(p >= 0 && p <= 255))) return undefined;
    return { value: parts.reduce((sum, p) => sum * 256n + BigInt(p), 0n), v6: false };
  }
  const [head = "", tail] = text.split("::");
  const left = head ? head.split(":") : [];
  const right = tail ? tail.split(":") : [];
  const middle = tail === undefined ? 0 : 8 - left.length - right.length;
  const all = [...left, ...Array<string>(Math.max(0, middle)).fill("0"), ...right];
  if (all.length !== 8 || all.some((p) => !/^[0-9a-f]{1,4}$/i.test(p))) return undefined;
  return { value: all.reduce((sum, p) => sum * 65536n + BigInt(parseInt(p, 16)), 0n), v6: true };
}

export function formatAddress(value: bigint, v6: boolean): string {
  if (!v6) return [24n, 16n, 8n, 0n].map((shift) => (value >> shift) & 255n).join(".");
  const groups = Array.from({ length: 8 }, (_, i) => ((value >> BigInt(112 - 16 * i)) & 65535n).toString(16));
  const text = groups.join(":");
  const zeros = [...text.matchAll(/(?:^|:)0(?::0)+(?=:|$)/g)].sort((a, b) => b[0].length - a[0].length)[0];
  if (!zeros) return text;
  const before = text.slice(0, zeros.index);
  const after = text.slice(zeros.index + zeros[0].length);
  return `${before}::${after.replace(/^:/, "")}`;
}

function spaces(): Space[] {
  const out: Space[] = [];
  const services = [...world.services.values()];
  for (const range of world.status?.ranges ?? []) {
    const [address = "", bits = "0"] = range.split("/");
    const base = parseAddress(address);
    if (!base) continue;
    const size = 1n << BigInt((base.v6 ? 128 : 32) - Number(bits));
    const space: Space = { id: range.replace("/", "_"), title: range, first: base.value, size, text: (n) => formatAddress(n, base.v6), taken: [] };
    for (const s of services)
      for (const ip of s.ips ?? []) {
        if (ip === "None" || ip.includes(":") !== base.v6) continue;
        const at = parseAddress(ip)?.value;
        if (at !== undefined && at >= base.value && at < base.value + size) space.taken.push({ at, ns: s.ns, name: s.name, what: ip });
      }
    out.push(space);
  }
  const [from, to] = (world.status?.nodePorts ?? "").split("-").map(Number);
  if (from && to) {
    const space: Space = { id: "ports", title: `Node ports ${from}–${to}`, first: BigInt(from), size: BigInt(to - from + 1), text: (n) => String(n), taken: [] };
    for (const s of services) {
      const ports = new Map<number, string>();
      for (const p of s.ports ?? []) if (p.nodePort) ports.set(p.nodePort, `${ports.get(p.nodePort) ? ports.get(p.nodePort) + ", " : ""}${p.name || p.port}/${p.protocol}`);
      if (s.healthPort) ports.set(s.healthPort, "health checks");
      for (const [port, what] of ports) if (port >= from && port <= to) space.taken.push({ at: BigInt(port), ns: s.ns, name: s.name, what });
    }
    out.push(space);
  }
  for (const space of out) space.taken.sort((a, b) => (a.at < b.at ? -1 : a.at > b.at ? 1 : 0));
  return out;
}

const maxListed = 300;

export function Ranges({ path }: { path: string[] }) {
  const version = useWorld();
  const all = useMemo(spaces, [version]);
  const space = all.find((s) => s.id === path[0]) ?? all[0];
  useEffect(() => void (document.title = "Addresses · Portal"), []);
  if (!space)
    return (
      <section class="empty">
        <h1>Addresses</h1>
        <p>{world.status?.synced ? "You may not see the ranges (ServiceCIDRs)." : "Loading …"}</p>
      </section>
    );
  // What is open is a start and a size, in the page's address: 10.96.4.0+256.
  const [startText, sizeText] = (path[1] ?? "").split("+");
  let start = space.first;
  let size = space.size;
  if (startText && sizeText && /^\d+$/.test(sizeText)) {
    const at = space.id === "ports" ? (/^\d+$/.test(startText) ? BigInt(startText) : undefined) : parseAddress(startText)?.value;
    if (at !== undefined && at >= space.first && at + BigInt(sizeText) <= space.first + space.size) [start, size] = [at, BigInt(sizeText)];
  }
  const here = space.taken.filter((t) => t.at >= start && t.at < start + size);
  const whole = start === space.first && size === space.size;
  return (
    <>
      <h1>Addresses and ports</h1>
      <nav class="tabs" aria-label="Ranges">
        {all.map((s) => (
          <Link key={s.id} to={href(["ranges", s.id])} aria-current={s === space ? "true" : undefined}>
            {s.title} <small>{s.taken.length.toLocaleString("en")} taken</small>
          </Link>
        ))}
      </nav>
      {!world.status?.all && <p class="banner note">Only what Services that you may see have taken is shown.</p>}
      {space.id === "ports" && !world.status?.nodePortsKnown && <p class="banner note">The API does not say which range the server has: this is the default.</p>}
      <section class="card">
        <h2>
          {whole ? space.title : `${space.text(start)} – ${space.text(start + size - 1n)}`}{" "}
          <small>
            {here.length.toLocaleString("en")} of {size > 1n << 40n ? "very many" : size.toLocaleString("en")} taken
          </small>
          {!whole && (
            <Link class="back" to={href(["ranges", space.id])}>
              Whole range
            </Link>
          )}
        </h2>
        <RangeMap space={space} start={start} size={size} here={here} />
        <p class="hint legend">
          <i class="l0" /> free <i class="l1" /> few <i class="l2" /> some <i class="l3" /> most <i class="l4" /> all taken
        </p>
      </section>
      <section class="card">
        <h2>Taken by</h2>
        {here.length === 0 ? (
          <p class="hint">Nothing here is taken.</p>
        ) : (
          <div class="scroll" tabIndex={0} role="region" aria-label="Taken by">
            <table>
              <thead>
                <tr>
                  <th>{space.id === "ports" ? "Port" : "Address"}</th>
                  <th>Service</th>
                  <th>Namespace</th>
                  {space.id === "ports" && <th>For</th>}
                </tr>
              </thead>
              <tbody>
                {here.slice(0, maxListed).map((t) => (
                  <tr key={`${t.at}/${t.ns}/${t.name}`}>
                    <td>
                      <code>{space.text(t.at)}</code>
                    </td>
                    <td>
                      <Link to={href(["services", t.ns, t.name])}>{t.name}</Link>
                    </td>
                    <td>{t.ns}</td>
                    {space.id === "ports" && <td>{t.what}</td>}
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        )}
        {here.length > maxListed && <p class="hint">And {count(here.length - maxListed, "more", "more")}: choose a part of the map.</p>}
      </section>
    </>
  );
}

const level = (taken: number, size: bigint) => {
  if (taken === 0) return 0;
  if (BigInt(taken) >= size) return 4;
  const part = taken / Number(size);
  return part < 0.1 ? 1 : part < 0.5 ? 2 : 3;
};

function RangeMap({ space, start, size, here }: { space: Space; start: bigint; size: bigint; here: Space["taken"] }) {
  const cell = size <= 256n ? 1n : (size + 255n) / 256n;
  const cells = Number((size + cell - 1n) / cell);
  const counts = new Array<number>(cells).fill(0);
  const owners = new Array<string>(cells).fill("");
  for (const t of here) {
    const i = Number((t.at - start) / cell);
    counts[i]!++;
    owners[i] = `${t.ns}/${t.name}`;
  }
  return (
    <div class="map" role="list" aria-label="Map of the range">
      {counts.map((n, i) => {
        const from = start + BigInt(i) * cell;
        const length = from + cell > start + size ? start + size - from : cell;
        const label = cell === 1n ? `${space.text(from)}: ${n ? owners[i] : "free"}` : `${space.text(from)} – ${space.text(from + length - 1n)}: ${n} of ${length} taken`;
        const kind = "l" + level(n, length);
        if (n === 0) return <span key={i} class={kind} title={label} aria-hidden="true" />;
        const to = cell === 1n ? href(["services", ...owners[i]!.split("/")]) : href(["ranges", space.id, `${space.text(from)}+${length}`]);
        return (
          <span key={i} role="listitem">
            <Link to={to} class={kind} title={label} aria-label={label}>
              {""}
            </Link>
          </span>
        );
      })}
    </div>
  );
}
