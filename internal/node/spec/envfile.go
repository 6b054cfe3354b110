package spec

import (
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// fromFile is the value that a file in a volume has for a key, and whether it has one.
func fromFile(ref *corev1.FileKeySelector, f Facts) (value string, found bool, err error) {
	if f.File == nil {
		return "", false, errors.New("fileKeyRef: there are no files here")
	}
	text, err := f.File(ref.VolumeName, ref.Path)
	if err == nil {
		if value, found, err = envValue(text, ref.Key); err != nil {
			return "", false, fmt.Errorf("file %s in volume %s: %w", ref.Path, ref.VolumeName, err)
		}
		if found {
			return value, true, nil
		}
		err = &MissingError{"key of file " + ref.Path + " in volume " + ref.VolumeName, ref.Key}
	}
	if optional(err, ref.Optional) {
		return "", false, nil
	}
	return "", false, err
}

// envValue looks for a key in a file of variables. It has lines NAME='value', as shells read them: with white space before them and a comment
// after them; a value ends at the next quote, maybe lines later, and nothing in it means anything else. After NAME= and white space, the value
// is empty. The first line of a name counts. Errors don't quote the file, which may have secrets.
func envValue(text, key string) (value string, found bool, err error) {
	if strings.ContainsRune(text, 0) {
		return "", false, errors.New("has a null character")
	}
	for line := 1; text != ""; line++ {
		first, rest, _ := strings.Cut(text, "\n")
		first = strings.TrimSpace(first)
		if first == "" || first[0] == '#' {
			text = rest
			continue
		}
		name, _, assigns := strings.Cut(first, "=")
		if !assigns || name == "" || strings.ContainsAny(name, " \t") {
			return "", false, fmt.Errorf("line %d: must be NAME='value', without white space before the equals sign", line)
		}
		_, body, _ := strings.Cut(text, "=")
		switch {
		case strings.HasPrefix(body, " ") || strings.HasPrefix(body, "\t"):
			value = ""
		case !strings.HasPrefix(body, "'"):
			return "", false, fmt.Errorf("line %d: the value must be in single quotes", line)
		default:
			var closed bool
			var after string
			if value, after, closed = strings.Cut(body[1:], "'"); !closed {
				return "", false, fmt.Errorf("line %d: the single quote is not closed", line)
			}
			line += strings.Count(value, "\n")
			after, rest, _ = strings.Cut(after, "\n")
			if after = strings.TrimSpace(after); after != "" && after[0] != '#' {
				return "", false, fmt.Errorf("line %d: nothing but a comment may follow the value", line)
			}
		}
		if name == key {
			return value, true, nil
		}
		text = rest
	}
	return "", false, nil
}
