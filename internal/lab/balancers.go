package lab

import (
	"context"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"portal/internal/identity"
)

// allowBalancers lets the nodes be load balancers, and read the Secrets of certificates, if they have pools.
func (l *Lab) allowBalancers(ctx context.Context) error {
	if len(l.BalancerPools) == 0 {
		return nil
	}
	for name, binding := range map[string]struct{ role, group string }{
		"lab-load-balancers": {identity.MachineLB, identity.Node.Group()}, "lab-load-balancer-certificates": {identity.LBCertificates, identity.LB.Group()},
	} {
		_, err := l.API.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: binding.role},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: binding.group}},
		}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return nil
}
