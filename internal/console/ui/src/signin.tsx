import { load } from "js-yaml";
import { useEffect, useRef, useState } from "preact/hooks";
import { ask } from "./live";

interface Credentials {
  token?: string;
  certificate?: string;
  key?: string;
  code?: string;
  namespaces?: string[];
}

interface Kubeconfig {
  "current-context"?: string;
  contexts?: { name: string; context: { user?: string; namespace?: string; cluster?: string } }[];
  users?: { name: string; user: Record<string, unknown> }[];
}

const decode = (text: unknown) => new TextDecoder().decode(Uint8Array.from(atob(String(text)), (c) => c.charCodeAt(0)));

/** parse reads a kubeconfig. It stays in the browser: only the credentials of one of its contexts are sent. */
function parse(text: string): Kubeconfig {
  const config = load(text) as Kubeconfig | undefined;
  if (!config || typeof config !== "object" || !Array.isArray(config.contexts) || config.contexts.length === 0)
    throw new Error("This file is no kubeconfig: it has no contexts.");
  return config;
}

/** credentialsOf are those of a context, or an error that says why they can't be used in a browser. */
function credentialsOf(config: Kubeconfig, name: string): Credentials {
  const context = config.contexts?.find((c) => c.name === name)?.context;
  const user = config.users?.find((u) => u.name === context?.user)?.user;
  if (!context || !user) throw new Error(`The context ${name} has no user in this file.`);
  const namespaces = context.namespace ? [context.namespace] : [];
  if (user["token"]) return { token: String(user["token"]), namespaces };
  if (user["client-certificate-data"] && user["client-key-data"])
    return { certificate: decode(user["client-certificate-data"]), key: decode(user["client-key-data"]), namespaces };
  if (user["exec"] || user["auth-provider"])
    throw new Error("This user's credentials come from a program, which a browser can't run. Run `portal console` on your machine instead.");
  if (user["client-certificate"] || user["tokenFile"])
    throw new Error("This kubeconfig names files, which a browser can't read. Make one that has them in it: kubectl config view --raw --flatten");
  throw new Error(`The user of the context ${name} has neither a token nor a certificate.`);
}

export function SignIn({ reason, done }: { reason: string; done: (user: string) => void }) {
  const [about, setAbout] = useState<{ code: boolean; server: string }>();
  const [kubeconfig, setKubeconfig] = useState<Kubeconfig>();
  const [fileName, setFileName] = useState("");
  const [context, setContext] = useState("");
  const [token, setToken] = useState("");
  const [namespaces, setNamespaces] = useState("");
  const [problem, setProblem] = useState(reason);
  const [busy, setBusy] = useState(false);
  const [over, setOver] = useState(false);
  const file = useRef<HTMLInputElement>(null);

  const enter = async (credentials: Credentials) => {
    setBusy(true);
    setProblem("");
    try {
      const wanted = namespaces.split(/[\s,]+/).filter(Boolean);
      const answer = await ask<{ user: string }>("POST", "signin", { ...credentials, namespaces: [...new Set([...(credentials.namespaces ?? []), ...wanted])] });
      done(answer.user);
    } catch (error) {
      setProblem(capital((error as Error).message));
      setBusy(false);
    }
  };

  useEffect(() => {
    const code = new URLSearchParams(location.hash.slice(1)).get("code");
    if (code) {
      history.replaceState(null, "", location.pathname + location.search);
      void enter({ code });
    }
    ask<{ code: boolean; server: string }>("GET", "about").then(setAbout, (error: Error) => setProblem(capital(error.message)));
  }, []);

  const take = async (chosen: File | undefined) => {
    if (!chosen) return;
    try {
      const config = parse(await chosen.text());
      setKubeconfig(config);
      setFileName(chosen.name);
      setContext(config["current-context"] || config.contexts![0]!.name);
      setProblem("");
    } catch (error) {
      setKubeconfig(undefined);
      setProblem((error as Error).message);
    }
  };

  const submit = (e: Event) => {
    e.preventDefault();
    try {
      if (kubeconfig) void enter(credentialsOf(kubeconfig, context));
      else if (token.trim()) void enter({ token: token.trim() });
      else setProblem("Choose a kubeconfig, or paste a token.");
    } catch (error) {
      setProblem((error as Error).message);
    }
  };

  return (
    <main class="signin">
      <form onSubmit={submit} aria-labelledby="signin-title">
        <h1 id="signin-title">
          <img src="/console/icon.svg" alt="" width="36" height="36" /> Portal console
        </h1>
        <p>Sign in as you do with kubectl. You see what you may see, and nothing is changed.</p>
        <p class="error" role="alert" id="signin-problem">
          {problem}
        </p>
        {about?.code && <p class="hint">Signing in to {about.server}. The address that <code>portal console</code> printed signs you in by itself.</p>}
        <div
          class={"drop" + (over ? " over" : "")}
          onDragOver={(e) => {
            e.preventDefault();
            setOver(true);
          }}
          onDragLeave={() => setOver(false)}
          onDrop={(e) => {
            e.preventDefault();
            setOver(false);
            void take(e.dataTransfer?.files[0]);
          }}
        >
          <label for="kubeconfig">Kubeconfig</label>
          <input id="kubeconfig" ref={file} type="file" onChange={(e) => void take(e.currentTarget.files?.[0])} />
          <small>{kubeconfig ? `${fileName} is read here; only the chosen user's credentials are sent.` : "Choose the file, or drop it here. It is read in the browser."}</small>
        </div>
        {kubeconfig && kubeconfig.contexts!.length > 1 && (
          <label>
            Context
            <select value={context} onChange={(e) => setContext(e.currentTarget.value)}>
              {kubeconfig.contexts!.map((c) => (
                <option key={c.name} value={c.name}>
                  {c.name}
                </option>
              ))}
            </select>
          </label>
        )}
        {!kubeconfig && (
          <label>
            or a token
            <input type="password" name="token" autocomplete="off" spellcheck={false} value={token} onInput={(e) => setToken(e.currentTarget.value)} />
          </label>
        )}
        <details>
          <summary>I may see some namespaces only</summary>
          <label>
            Namespaces
            <input name="namespaces" spellcheck={false} autocapitalize="off" placeholder="shop, billing" value={namespaces} onInput={(e) => setNamespaces(e.currentTarget.value)} />
          </label>
          <small>Needed if you may not list namespaces.</small>
        </details>
        <button class="primary" type="submit" disabled={busy}>
          {busy ? "Signing in …" : "Sign in"}
        </button>
      </form>
    </main>
  );
}

const capital = (text: string) => text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
