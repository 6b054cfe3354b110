package storagemigration

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	storagemigrationv1 "k8s.io/api/storagemigration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"
)

var (
	secrets = schema.GroupResource{Resource: "secrets"}
	ticking = clocktesting.NewFakeClock(time.Unix(1e9, 0))
)

func TestPermanent(t *testing.T) {
	kind := schema.GroupKind{Kind: "Secret"}
	for _, c := range []struct {
		err  error
		want bool
	}{
		{apierrors.NewForbidden(secrets, "s", errors.New("no")), true},
		{apierrors.NewInvalid(kind, "s", nil), true},
		{apierrors.NewBadRequest("what?"), true},
		{apierrors.NewConflict(secrets, "s", errors.New("changed")), false},
		{apierrors.NewNotFound(secrets, "s"), false},
		{apierrors.NewResourceExpired("gone"), false},
		{apierrors.NewTooManyRequests("later", 1), false},
		{apierrors.NewInternalError(errors.New("broken")), false},
		{apierrors.NewTimeoutError("slow", 1), false},
		{errors.New("connection refused"), false},
	} {
		if got := permanent(fmt.Errorf("migrate secrets: %w", c.err)); got != c.want {
			t.Errorf("%v: %v", c.err, got)
		}
	}
}

// A list whose rest is gone goes on where it was.
func TestRewriteResumes(t *testing.T) {
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	client := metadatafake.NewSimpleMetadataClient(scheme)
	var touched, asked []string
	client.PrependReactor("list", "secrets", func(clienttesting.Action) (bool, runtime.Object, error) {
		if len(asked) == 3 {
			t.Fatal("asked for a fourth page")
		}
		from := []string{"", "old", "new"}[len(asked)] // the fake client does not pass the token on
		asked = append(asked, from)
		page := &metav1.List{}
		switch from {
		case "":
			page.Continue = "old"
		case "old":
			gone := apierrors.NewResourceExpired("gone")
			gone.ErrStatus.Continue = "new"
			return true, nil, gone
		}
		item := &metav1.PartialObjectMetadata{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"}, ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "from" + from},
		}
		page.Items = []runtime.RawExtension{{Object: item}}
		return true, page, nil
	})
	client.PrependReactor("patch", "secrets", func(a clienttesting.Action) (bool, runtime.Object, error) {
		touched = append(touched, a.(clienttesting.PatchAction).GetName())
		return true, &metav1.PartialObjectMetadata{}, nil
	})
	c := &Controller{metadata: client}
	if err := c.rewrite(t.Context(), secrets.WithVersion("v1")); err != nil {
		t.Fatalf("%v, after %q", err, asked)
	}
	if got := strings.Join(touched, " "); got != "from fromnew" {
		t.Errorf("written: %s", got)
	}
}

// What a part of discovery doesn't tell may be served.
func TestPartialDiscovery(t *testing.T) {
	client := fake.NewClientset()
	client.Resources = []*metav1.APIResourceList{{GroupVersion: "v1"}}
	failure := error(&discovery.ErrGroupDiscoveryFailed{Groups: map[schema.GroupVersion]error{{Group: "example.com", Version: "v1"}: errors.New("down")}})
	c := &Controller{discovery: partial{client.Discovery(), failure}}
	if _, problem, err := c.find(metav1.GroupResource{Group: "example.com", Resource: "widgets"}); !errors.Is(err, failure) {
		t.Errorf("%q, %v", problem, err)
	}
	c.discovery = partial{client.Discovery(), nil}
	if _, problem, err := c.find(metav1.GroupResource{Group: "example.com", Resource: "widgets"}); err != nil || problem == "" {
		t.Errorf("%q, %v", problem, err)
	}
}

type partial struct {
	discovery.DiscoveryInterface
	failure error
}

func (p partial) ServerPreferredResources() ([]*metav1.APIResourceList, error) {
	return []*metav1.APIResourceList{{GroupVersion: "v1"}}, p.failure
}

// How a migration ended is written down though somebody changed it meanwhile, unless it is another one by now.
func TestEndAfterAConflict(t *testing.T) {
	for _, uid := range []string{"1", "2"} {
		stored := &storagemigrationv1.StorageVersionMigration{ObjectMeta: metav1.ObjectMeta{Name: "m"}}
		stored.UID = types.UID(uid)
		client := fake.NewClientset(stored)
		writes := 0
		client.PrependReactor("update", "storageversionmigrations", func(clienttesting.Action) (bool, runtime.Object, error) {
			writes++
			if writes == 1 {
				return true, nil, apierrors.NewConflict(secrets, "m", errors.New("changed"))
			}
			return false, nil, nil
		})
		c := &Controller{client: client, clock: ticking}
		m := &storagemigrationv1.StorageVersionMigration{ObjectMeta: metav1.ObjectMeta{Name: "m", UID: "1"}}
		if _, err := c.end(t.Context(), m, storagemigrationv1.MigrationSucceeded, "Migrated", "done"); err != nil {
			t.Fatal(err)
		}
		now, err := client.StoragemigrationV1().StorageVersionMigrations().Get(t.Context(), "m", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if ended := meta.IsStatusConditionTrue(now.Status.Conditions, string(storagemigrationv1.MigrationSucceeded)); ended != (uid == "1") {
			t.Errorf("UID %s: ended: %v", uid, ended)
		}
	}
}
