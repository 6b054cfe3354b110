package apiserver

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"sigs.k8s.io/yaml"

	"portal/internal/apiserver/registry"
)

const (
	// smallBody is a size at which a body can't hold enough members to matter.
	smallBody = 64 << 10
	// maxDepth is how deep a patch may be nested. No object of the API comes near it, and to merge a patch takes time that
	// grows with the square of its depth.
	maxDepth = 200
)

// withMemberLimit rejects bodies in which one object has very many members, such as a ConfigMap of 150,000 keys: who manages
// which field is computed before any rule of a resource is asked, and takes time that grows with the square of their number.
// Patches that are nested very deep are rejected too.
func withMemberLimit(next http.Handler, codecs serializer.CodecFactory, most int64) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		writes := r.Method == http.MethodPost || r.Method == http.MethodPut || r.Method == http.MethodPatch
		small := r.ContentLength >= 0 && r.ContentLength < smallBody && r.Method != http.MethodPatch
		if !writes || r.Body == nil || small {
			next.ServeHTTP(w, r)
			return
		}
		// One byte more than is allowed, so that the library says that it is too large.
		data, err := io.ReadAll(io.LimitReader(r.Body, most+1))
		if err == nil && int64(len(data)) <= most {
			if refusal := judgeBody(r, data); refusal != nil {
				responsewriters.ErrorNegotiated(refusal, codecs, schema.GroupVersion{Version: "v1"}, w, r)
				return
			}
		}
		r.Body = &prefixed{Reader: io.MultiReader(bytes.NewReader(data), r.Body), Closer: r.Body}
		next.ServeHTTP(w, r)
	})
}

func judgeBody(r *http.Request, data []byte) error {
	most, depth := members(r.Header.Get("Content-Type"), data)
	switch {
	case most > registry.MaxKeys:
		return apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("an object or map in it has %d members, at most %d are allowed", most, registry.MaxKeys))
	case depth > maxDepth && r.Method == http.MethodPatch:
		return apierrors.NewBadRequest(fmt.Sprintf("the patch is nested %d levels deep, at most %d are allowed", depth, maxDepth))
	}
	return nil
}

type prefixed struct {
	io.Reader
	io.Closer
}

// members is the largest number of members that an object in a body has, and how deep JSON is nested. What can't be read has
// none: the library says why.
func members(contentType string, body []byte) (most, depth int) {
	if strings.Contains(contentType, "protobuf") {
		return protobufMembers(body), 0
	}
	if trimmed := bytes.TrimLeft(body, " \t\r\n"); len(trimmed) > 0 && (trimmed[0] == '{' || trimmed[0] == '[') {
		return jsonMembers(trimmed)
	}
	var value any
	if yaml.Unmarshal(body, &value) != nil {
		return 0, 0
	}
	return yamlMembers(value), 0
}

// jsonMembers counts without decoding: a comma outside of a string parts two members of the innermost object or list.
func jsonMembers(body []byte) (most, depth int) {
	var open []int // members of each object around this place; -1 for a list
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case '"':
			for i++; i < len(body) && body[i] != '"'; i++ {
				if body[i] == '\\' {
					i++
				}
			}
		case '{':
			open = append(open, 1)
		case '[':
			open = append(open, -1)
		case '}', ']':
			if len(open) > 0 {
				open = open[:len(open)-1]
			}
		case ',':
			if top := len(open) - 1; top >= 0 && open[top] > 0 {
				open[top]++
				most = max(most, open[top])
			}
		}
		depth = max(depth, len(open))
	}
	return most, depth
}

func yamlMembers(value any) int {
	most := 0
	switch value := value.(type) {
	case map[string]any:
		most = len(value)
		for _, inner := range value {
			most = max(most, yamlMembers(inner))
		}
	case []any:
		for _, inner := range value {
			most = max(most, yamlMembers(inner))
		}
	}
	return most
}

// protobufMembers counts the fields of the object in the envelope and those of its metadata: maps are there.
func protobufMembers(body []byte) int {
	const envelope = 4 // the magic number before it
	if len(body) < envelope {
		return 0
	}
	object := fieldsOf(body[envelope:], 2)
	if len(object) != 1 {
		return 0
	}
	most := countFields(object[0])
	for _, metadata := range fieldsOf(object[0], 1) {
		most = max(most, countFields(metadata))
	}
	return most
}

// fieldsOf are the values of a message's length-delimited fields with a number.
func fieldsOf(message []byte, number protowire.Number) (out [][]byte) {
	for len(message) > 0 {
		n, kind, size := protowire.ConsumeTag(message)
		if size < 0 {
			return out
		}
		message = message[size:]
		length := protowire.ConsumeFieldValue(n, kind, message)
		if length < 0 {
			return out
		}
		if n == number && kind == protowire.BytesType {
			value, _ := protowire.ConsumeBytes(message)
			out = append(out, value)
		}
		message = message[length:]
	}
	return out
}

func countFields(message []byte) int {
	count := 0
	for len(message) > 0 {
		_, _, size := protowire.ConsumeField(message)
		if size < 0 {
			break
		}
		count++
		message = message[size:]
	}
	return count
}
