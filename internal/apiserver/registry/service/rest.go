package service

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/dryrun"

	"portal/internal/alloc"
	portalregistry "portal/internal/apiserver/registry"
	"portal/internal/store"
)

// Allocation is what Services need to get addresses and ports: an allocator to choose with, and the store that decides.
type Allocation struct {
	Allocator *alloc.Allocator
	// Families are the address families of the cluster; the first is the default.
	Families func() []corev1.IPFamily
	// Reserved says that an address is for the kubernetes Service only; nil reserves none.
	Reserved func(netip.Addr) bool
	// Claimed asks the store whether a claim is held, for requests that store nothing themselves.
	Claimed func(ctx context.Context, key string) (bool, error)
	// Refresh makes the allocator see everything at once, before it says that a range is full.
	Refresh func(ctx context.Context) error
}

// Served describes Services with storage that allocates.
func (a *Allocation) Served() portalregistry.Resource {
	kind := New()
	kind.Customize = func(s *registry.Store, storage map[string]rest.Storage) error {
		s.BeginCreate = func(ctx context.Context, obj runtime.Object, _ *metav1.CreateOptions) (registry.FinishFunc, error) {
			return allocate(ctx, obj.(*corev1.Service), nil)
		}
		s.BeginUpdate = func(ctx context.Context, obj, old runtime.Object, _ *metav1.UpdateOptions) (registry.FinishFunc, error) {
			return allocate(ctx, obj.(*corev1.Service), old.(*corev1.Service))
		}
		storage[kind.Plural] = &allocatingREST{REST: storage[kind.Plural].(*portalregistry.REST), allocation: a}
		return nil
	}
	return kind
}

// allocatingREST gives every request a hold of its own on what is chosen for it, and chooses again what another server
// was quicker to claim.
type allocatingREST struct {
	*portalregistry.REST
	allocation *Allocation
}

// attempts is how often a request chooses anew. Each failed choice is marked as taken, so that a second failure means
// a crowd of servers and a third is hardly ever seen.
const attempts = 16

func (r *allocatingREST) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc,
	options *metav1.CreateOptions,
) (runtime.Object, error) {
	name := obj.(*corev1.Service).Name
	validate = (&charge{}).create(validate)
	var out runtime.Object
	err := r.allocation.attempt(ctx, name, dryrun.IsDryRun(options.DryRun), func(ctx context.Context) (err error) {
		ctx.Value(choiceKey{}).(*choice).exists = func() bool {
			_, err := r.REST.Get(ctx, name, &metav1.GetOptions{})
			return name != "" && err == nil
		}
		out, err = r.REST.Create(ctx, obj.DeepCopyObject(), validate, options)
		return err
	})
	return out, err
}

func (r *allocatingREST) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo,
	createValidation rest.ValidateObjectFunc, updateValidation rest.ValidateObjectUpdateFunc, forceCreate bool,
	options *metav1.UpdateOptions,
) (runtime.Object, bool, error) {
	c := &charge{}
	createValidation, updateValidation = c.create(createValidation), c.update(updateValidation)
	var out runtime.Object
	var created bool
	err := r.allocation.attempt(ctx, name, dryrun.IsDryRun(options.DryRun), func(ctx context.Context) (err error) {
		out, created, err = r.REST.Update(ctx, name, info, createValidation, updateValidation, forceCreate, options)
		return err
	})
	return out, created, err
}

// charge is what a request was charged with: the attempts after the one that was admitted cost nothing.
type charge struct {
	created bool
	updated string // the version of the object that the admitted update changes
}

type chargedKey struct{}

// Charged says that a quota was charged for an earlier attempt of the same request.
func Charged(ctx context.Context) bool { return ctx.Value(chargedKey{}) != nil }

func (c *charge) create(validate rest.ValidateObjectFunc) rest.ValidateObjectFunc {
	if validate == nil {
		return nil
	}
	return func(ctx context.Context, obj runtime.Object) error {
		if c.created {
			ctx = context.WithValue(ctx, chargedKey{}, true)
		}
		err := validate(ctx, obj)
		c.created = c.created || err == nil
		return err
	}
}

// update charges again if the object was changed meanwhile: the difference may be another one.
func (c *charge) update(validate rest.ValidateObjectUpdateFunc) rest.ValidateObjectUpdateFunc {
	if validate == nil {
		return nil
	}
	return func(ctx context.Context, obj, old runtime.Object) error {
		version := old.(*corev1.Service).ResourceVersion
		if version != "" && c.updated == version {
			ctx = context.WithValue(ctx, chargedKey{}, true)
		}
		err := validate(ctx, obj, old)
		if err == nil {
			c.updated = version
		}
		return err
	}
}

// attempt runs a request until it succeeds or fails for a reason of its own.
func (a *Allocation) attempt(ctx context.Context, name string, trial bool, request func(context.Context) error) error {
	refreshed := false
	for try := 1; ; try++ {
		choice := &choice{ctx: ctx, allocation: a, reservation: a.Allocator.Begin(trial), trial: trial}
		err := request(context.WithValue(ctx, choiceKey{}, choice))
		if err == nil {
			choice.reservation.Commit()
			return nil
		}
		choice.reservation.Release()
		if choice.full && !refreshed {
			// The allocator may not have seen yet what was freed.
			refreshed = true
			if a.Refresh(ctx) == nil {
				continue
			}
		}
		var many *store.TooManyClaimsError
		if errors.As(err, &many) {
			return choice.tooMany(name, many)
		}
		key, taken := store.Claimed(err)
		if !taken {
			return err
		}
		claim, ok := claimOf(key)
		if !ok {
			return err
		}
		if choice.reservation.Chose(claim) && try < attempts {
			a.Allocator.Taken(claim)
			continue
		}
		return choice.conflict(name, claim)
	}
}

type choiceKey struct{}

// choice is one attempt's Choice.
type choice struct {
	ctx         context.Context
	allocation  *Allocation
	reservation *alloc.Reservation
	trial       bool
	full        bool
	// exists says, to a request that creates, whether there is a Service of that name.
	exists func() bool
	// asked are the ports that the user asked for, which are not chosen for anything else in the same Service.
	asked map[int32]bool
	// last is the object as it was last handed to the store, to name the field of a conflict.
	last *corev1.Service
}

// allocate settles an object's addresses and ports with the request's choice. Nothing has to be undone when the
// request fails later: its hold ends with it.
func allocate(ctx context.Context, obj, old *corev1.Service) (registry.FinishFunc, error) {
	c, ok := ctx.Value(choiceKey{}).(*choice)
	if !ok {
		return nil, fmt.Errorf("a Service is written without a hold on addresses")
	}
	c.last = obj
	if errs := Allocate(obj, old, c); len(errs) > 0 {
		return nil, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Service").GroupKind(), obj.Name, errs)
	}
	return func(context.Context, bool) {}, nil
}

func (c *choice) Families() []corev1.IPFamily { return c.allocation.Families() }

func (c *choice) Address(family corev1.IPFamily) (string, error) {
	for {
		addr, err := c.reservation.Address(family == corev1.IPv6Protocol)
		if err != nil {
			return "", c.noteFull(err)
		}
		if !c.reserved(addr) { // else the request holds it from here on, and gets another
			return addr.String(), nil
		}
	}
}

// reserved says that this request may not have an address: it is kept for the Service of the API itself.
func (c *choice) reserved(addr netip.Addr) bool {
	if c.allocation.Reserved == nil || !c.allocation.Reserved(addr) {
		return false
	}
	return c.last.Name != "kubernetes" || genericrequest.NamespaceValue(c.ctx) != metav1.NamespaceDefault
}

func (c *choice) TakeAddress(_ corev1.IPFamily, ip string) error {
	addr, err := netip.ParseAddr(ip)
	if err != nil {
		return fmt.Errorf("%q is no IP address", ip)
	}
	if err := c.reservation.CheckAddress(addr); err != nil {
		return err
	}
	if c.reserved(addr) {
		return errors.New("it is reserved for the Service kubernetes in the namespace default")
	}
	return c.checkFree(addressKey(addr))
}

func (c *choice) NodePort() (int32, error) {
	for {
		port, err := c.reservation.Port()
		if err != nil {
			return 0, c.noteFull(err)
		}
		if !c.asked[int32(port)] { // else the request holds it from here on, and gets another
			return int32(port), nil
		}
	}
}

func (c *choice) TakeNodePort(port int32) error {
	if err := c.reservation.CheckPort(port); err != nil {
		return err
	}
	if c.asked == nil {
		c.asked = map[int32]bool{}
	}
	c.asked[port] = true
	return c.checkFree(portKey(uint16(port)))
}

// checkFree asks the store for requests that will not write: the others learn it from the transaction.
func (c *choice) checkFree(key string) error {
	if !c.trial {
		return nil
	}
	claimed, err := c.allocation.Claimed(c.ctx, key)
	if err != nil {
		return err
	}
	if claimed && (c.exists == nil || !c.exists()) {
		return errTaken
	}
	return nil // a Service that exists may hold it itself: that it exists is the answer then
}

// taken is what clients look for in the message.
const taken = "is already allocated to another Service"

var errTaken = errors.New("it " + taken)

func (c *choice) noteFull(err error) error {
	var full *alloc.FullError
	if errors.As(err, &full) {
		c.full = true
	}
	return err
}

// conflict is the answer to a request whose claim another object holds: it names the field.
func (c *choice) conflict(name string, claim alloc.Claim) error {
	spec := field.NewPath("spec")
	var err *field.Error
	switch {
	case claim.Addr.IsValid():
		err = field.Invalid(spec.Child("clusterIPs"), c.last.Spec.ClusterIPs, claim.Addr.String()+" "+taken)
	case int32(claim.Port) == c.last.Spec.HealthCheckNodePort:
		err = field.Invalid(spec.Child("healthCheckNodePort"), claim.Port, "port "+taken)
	default:
		err = field.Invalid(spec.Child("ports").Index(c.portIndex(claim.Port)).Child("nodePort"), claim.Port, "port "+taken)
	}
	return c.invalid(name, err)
}

// tooMany is the answer to a request for more new ports than etcd takes at once.
func (c *choice) tooMany(name string, err *store.TooManyClaimsError) error {
	return c.invalid(name, field.Invalid(field.NewPath("spec", "ports"), len(c.last.Spec.Ports),
		"too many new node ports for one request, add them in several: "+err.Error()))
}

func (c *choice) invalid(name string, err *field.Error) error {
	if name == "" {
		name = c.last.Name
	}
	return apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Service").GroupKind(), name, field.ErrorList{err})
}

func (c *choice) portIndex(port uint16) int {
	for i := range c.last.Spec.Ports {
		if c.last.Spec.Ports[i].NodePort == int32(port) {
			return i
		}
	}
	return 0
}
