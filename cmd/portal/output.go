package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/pflag"
)

// outputFlag adds --output, which checkOutput checks: for people if it is left out, else json.
func outputFlag(f *pflag.FlagSet, output *string) {
	f.StringVarP(output, "output", "o", "", "json for programs")
}

func checkOutput(output string) error {
	if output != "" && output != "json" {
		return usageError{fmt.Errorf("--output %q: must be json, or left out", output)}
	}
	return nil
}

func printJSON(out io.Writer, what any) error {
	encoder := json.NewEncoder(out)
	encoder.SetIndent("", "  ")
	return encoder.Encode(what)
}

// newTable aligns what is written to it in columns, with tabs between them.
func newTable(out io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(out, 0, 0, 2, ' ', 0) }

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
