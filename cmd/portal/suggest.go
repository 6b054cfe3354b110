package main

import (
	"errors"
	"fmt"
	"math"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// wanted are the values of flags by their types, in words.
var wanted = map[string]string{
	"bool": "true or false", "duration": "a duration such as 30s or 5m", "float64": "a number",
	"int": "a whole number", "int32": "a whole number", "int64": "a whole number",
	"uint": "a whole number from 0 on", "uint16": "a whole number from 0 to 65535", "uint32": "a whole number from 0 on", "uint64": "a whole number from 0 on",
}

// flagError is a mistake in a command's flags. For a flag that does not exist it names the one that was probably meant.
func flagError(cmd *cobra.Command, err error) error {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		if want := wanted[invalid.GetFlag().Value.Type()]; want != "" {
			return usageError{fmt.Errorf("--%s %q: must be %s", invalid.GetFlag().Name, invalid.GetValue(), want)}
		}
	}
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) || len(unknown.GetSpecifiedName()) < 2 {
		return usageError{err}
	}
	given := unknown.GetSpecifiedName()
	best, most := "", max(2, len(given)/3)+1
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if d := distance(given, f.Name); !f.Hidden && d < most {
			best, most = f.Name, d
		}
	})
	hint := cmd.CommandPath() + " --help lists the flags"
	if best != "" {
		hint = "did you mean --" + best + "?"
	}
	return usageError{fmt.Errorf("unknown flag --%s: %s", given, hint)}
}

// closest are the words that are most like another.
func closest(word string, among []string) (out []string) {
	best := math.MaxInt
	for _, other := range among {
		d := distance(word, other)
		if d < best {
			best, out = d, nil
		}
		if d == best {
			out = append(out, other)
		}
	}
	return out
}

// distance is how many characters must be inserted, removed or replaced to make one word of another.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = row[j+1]
			row[j+1] = min(replaced, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}
