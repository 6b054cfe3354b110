package serviceenv

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// Formats are the formats of Write.
var Formats = []string{"sh", "docker", "json"}

// Write writes variables: sh for eval, docker for --env-file and a unit's EnvironmentFile, json as a list of
// {"name","value"}. It returns the names that are not valid in a shell, which sh leaves out.
func Write(w io.Writer, vars []Var, format string) (skipped []string, err error) {
	switch format {
	case "json":
		if vars == nil {
			vars = []Var{}
		}
		e := json.NewEncoder(w)
		e.SetEscapeHTML(false)
		e.SetIndent("", "  ")
		return nil, e.Encode(vars)
	case "docker":
		for _, v := range vars {
			if _, err := fmt.Fprintf(w, "%s=%s\n", v.Name, v.Value); err != nil {
				return nil, err
			}
		}
		return nil, nil
	case "sh":
		return writeShell(w, vars)
	}
	return nil, fmt.Errorf("no format %q: one of %s", format, strings.Join(Formats, ", "))
}

// writeShell assigns first and exports at the end, so that it works with `eval $(…)`, which joins lines with blanks.
func writeShell(w io.Writer, vars []Var) (skipped []string, err error) {
	var names []string
	for _, v := range vars {
		if v.Name[0] >= '0' && v.Name[0] <= '9' {
			skipped = append(skipped, v.Name)
			continue
		}
		names = append(names, v.Name)
		if _, err := fmt.Fprintf(w, "%s=%s\n", v.Name, quote(v.Value)); err != nil {
			return skipped, err
		}
	}
	if len(names) > 0 {
		_, err = fmt.Fprintf(w, "export %s\n", strings.Join(names, " "))
	}
	return skipped, err
}

func quote(s string) string {
	if strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.:/_-") == "" && s != "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
