package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"portal/internal/store"
)

func (o *storageOptions) reencryptCommand() *cobra.Command {
	cmd := o.command("reencrypt", "Rewrite everything that is not encrypted with the key that new objects are", noArgs, o.reencrypt)
	cmd.Long = `Rewrite every object and claim that is stored in another way than new ones are: plain, or with an older key. Nothing else of
them changes. Servers go on working meanwhile. Old revisions are dropped at the end, because they hold what was replaced.

To change the key: add the new one as the second of its provider in --encryption-provider-config of all servers, then make it
the first, run this, and remove the old one.`
	return cmd
}

func (o *storageOptions) reencrypt(ctx context.Context, out io.Writer, _ []string) error {
	k, err := o.open(ctx)
	if err != nil {
		return err
	}
	defer k.Close()
	done, err := k.Reencrypt(ctx, func(now store.Reencryption) {
		if o.output == "" {
			fmt.Fprintf(out, "%d of %d looked at, %d rewritten\n", now.Seen, now.Total, now.Rewritten)
		}
	})
	if err != nil {
		return fmt.Errorf("reencrypt: %w: run it again when this is resolved, it goes on where it ended", err)
	}
	if o.output == "json" {
		err = printJSON(out, done)
	} else {
		_, err = fmt.Fprintf(out, "%d of %d were rewritten; all others were encrypted as new ones are\n", done.Rewritten, done.Total)
	}
	switch {
	case err != nil:
		return err
	case len(done.Unreadable) > 0:
		return fmt.Errorf("%s can't be decrypted and were left as they are, e.g. %s", counted(len(done.Unreadable), "value", "values"), done.Unreadable[0])
	case len(done.Left) > 0:
		left := done.Left[0]
		return fmt.Errorf("%d of %s are still stored with %s: another server writes them so, give all servers the same configuration and run it again",
			left.Count, left.Resource, left.Header)
	}
	return nil
}

// printEncryption tells people what is encrypted with which key, and what to do about the rest.
func printEncryption(out io.Writer, e *store.Encryption) error {
	if e == nil {
		_, err := fmt.Fprintln(out, "\nNothing is encrypted (--encryption-provider-config).")
		return err
	}
	fmt.Fprintln(out)
	table := newTable(out)
	fmt.Fprintln(table, "RESOURCE\tSTORED\tCLAIMS\tPROVIDER\tKEY\tSTATE")
	stale := 0
	for _, u := range e.Usage {
		key := u.Key
		if u.KeyID != "" {
			key += " (key ID " + u.KeyID + ")"
		}
		state := "current"
		if u.Stale {
			stale += u.Count
			state = "stale"
		}
		if u.Unreadable > 0 {
			state = fmt.Sprintf("%d unreadable, e.g. %s: %s", u.Unreadable, u.Example, u.Reason)
		}
		fmt.Fprintf(table, "%s\t%d\t%d\t%s\t%s\t%s\n", u.Resource, u.Count, u.Claims, u.Provider, orDash(key), state)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if stale > 0 {
		fmt.Fprintf(out, "\n%d are stored in another way than new ones are: portal storage reencrypt\n", stale)
	}
	for _, problem := range e.Problems {
		fmt.Fprintf(out, "\n%s\n", problem)
	}
	return nil
}
