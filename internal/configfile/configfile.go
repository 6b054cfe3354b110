// Package configfile tells mistakes in a YAML configuration file by field and line. It knows no configuration, and never
// repeats a value: it may be a key.
package configfile

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/runtime"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Mistakes is the error of a decoder or a validation in words that name the file, and the line and the field where they
// can be found. It is nil if err is.
func Mistakes(file string, data []byte, err error) error {
	if err == nil {
		return nil
	}
	var texts []string
	for _, one := range split(err) {
		path, what := describe(one)
		place := file
		if line := Line(data, path); line > 0 {
			place += " line " + strconv.Itoa(line)
		}
		if path != "" {
			what = path + ": " + what
		}
		if text := place + ": " + what; !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	return errors.New(strings.Join(texts, "; "))
}

// split takes apart errors that hold several.
func split(err error) []error {
	if strict, ok := runtime.AsStrictDecodingError(err); ok {
		return strict.Errors()
	}
	var many utilerrors.Aggregate
	if errors.As(err, &many) {
		var out []error
		for _, one := range many.Errors() {
			out = append(out, split(one)...)
		}
		return out
	}
	return []error{err}
}

var (
	quotedPath = regexp.MustCompile(`^(unknown|duplicate) field "([^"]+)"$`)
	goField    = regexp.MustCompile(`json: cannot unmarshal (\S+) into Go struct field (?:[A-Z]\w*\.)+(\S+) of type (\S+)`)
)

// describe is the field that an error speaks of, if any, and what is wrong with it.
func describe(err error) (path, what string) {
	var invalid *field.Error
	if errors.As(err, &invalid) {
		switch invalid.Type {
		case field.ErrorTypeRequired:
			what = "is missing"
		case field.ErrorTypeNotSupported:
			what = "is not supported"
		default:
			what = "is wrong"
		}
		if invalid.Detail != "" {
			what += ": " + invalid.Detail
		}
		return invalid.Field, what
	}
	if m := quotedPath.FindStringSubmatch(err.Error()); m != nil {
		if m[1] == "duplicate" {
			return m[2], "is given twice"
		}
		return m[2], "there is no such field"
	}
	if m := goField.FindStringSubmatch(err.Error()); m != nil {
		return m[2], fmt.Sprintf("must be a %s, and is a %s", m[3], m[1])
	}
	return "", err.Error()
}

// Line is the line of the field with a path like rules[0].level, or of the nearest field around it that is there. It is 0
// if the path does not say which of several elements of a list is meant, or the data is no YAML.
func Line(data []byte, path string) int {
	var document yaml.Node
	if path == "" || yaml.Unmarshal(data, &document) != nil || len(document.Content) == 0 {
		return 0
	}
	return find(document.Content[0], steps(path), 0)
}

// steps cuts a path at its dots and brackets: names, and numbers of elements.
func steps(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '.' || r == '[' || r == ']' })
}

func find(node *yaml.Node, path []string, line int) int {
	if len(path) == 0 {
		return line
	}
	switch node.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(node.Content); i += 2 {
			if node.Content[i].Value == path[0] {
				return find(node.Content[i+1], path[1:], node.Content[i].Line)
			}
		}
	case yaml.SequenceNode:
		index, err := strconv.Atoi(path[0])
		switch {
		case err == nil && index < len(node.Content):
			return find(node.Content[index], path[1:], node.Content[index].Line)
		case err != nil && len(node.Content) == 1:
			return find(node.Content[0], path, line)
		case err != nil:
			return 0
		}
	}
	return line
}
