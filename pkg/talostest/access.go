package talostest

import (
	"context"
	"fmt"
	"slices"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/cosi-project/runtime/pkg/resource/meta"
	"github.com/cosi-project/runtime/pkg/state"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// errNotAuthorized is machined's error for callers without a sufficient role.
var errNotAuthorized = status.Error(codes.PermissionDenied, "not authorized")

// Roles that may call a method, as in machined of Talos v1.13.5. Methods that are not listed require os:admin.
var (
	readerRoles   = role.MakeSet(role.Admin, role.Operator, role.Reader)
	operatorRoles = role.MakeSet(role.Admin, role.Operator)
	adminRoles    = role.MakeSet(role.Admin)
	etcdReadRoles = role.MakeSet(role.Admin, role.Operator, role.Reader, role.EtcdBackup)

	methodRoles = buildMethodRoles()
)

func buildMethodRoles() map[string]role.Set {
	rules := map[string]role.Set{
		"/machine.ImageService/Verify":               role.MakeSet(role.Admin, role.Operator, role.Reader, role.ImageVerifier),
		"/machine.MachineService/ApplyConfiguration": role.MakeSet(role.Admin, role.Reader),
		"/machine.MachineService/EtcdSnapshot":       role.MakeSet(role.Admin, role.Operator, role.EtcdBackup),
		"/machine.MachineService/MetaWrite":          role.MakeSet(role.Admin, role.MetaWriter),
		"/machine.MachineService/MetaDelete":         role.MakeSet(role.Admin, role.MetaWriter),
		"/storage.StorageService/BlockDeviceWipe":    role.MakeSet(role.Admin, role.Reader),
	}

	add := func(roles role.Set, service string, methods ...string) {
		for _, method := range methods {
			rules["/"+service+"/"+method] = roles
		}
	}

	add(readerRoles, "cosi.resource.State", "Get", "List", "Watch")
	add(readerRoles, "cluster.ClusterService", "HealthCheck")
	add(readerRoles, "inspect.InspectService", "ControllerRuntimeDependencies")
	add(readerRoles, "storage.StorageService", "Disks")
	add(readerRoles, "time.TimeService", "Time", "TimeCheck")
	add(readerRoles, "machine.ImageService", "List")
	add(operatorRoles, "machine.ImageService", "Pull")
	add(readerRoles, "machine.MachineService",
		"CPUFreqStats", "CPUInfo", "Containers", "DiskStats", "DiskUsage", "Dmesg", "Events", "Hostname", "ImageList", "List", "LoadAvg",
		"Logs", "LogsContainers", "Memory", "Mounts", "Netstat", "NetworkDeviceStats", "Processes", "ServiceList", "Stats", "SystemStat",
		"Version")
	add(etcdReadRoles, "machine.MachineService", "EtcdAlarmList", "EtcdMemberList", "EtcdStatus")
	add(operatorRoles, "machine.MachineService",
		"EtcdAlarmDisarm", "EtcdDefragment", "EtcdDowngradeCancel", "EtcdDowngradeEnable", "EtcdDowngradeValidate", "ImagePull",
		"PacketCapture", "Reboot", "Restart", "ServiceRestart", "ServiceStart", "ServiceStop", "Shutdown")

	return rules
}

func authorizeMethod(method string, roles role.Set) error {
	allowed, listed := methodRoles[method]
	if !listed {
		allowed = adminRoles
	}

	if allowed.IncludesAny(roles) {
		return nil
	}

	return errNotAuthorized
}

// accessPolicy is Talos's policy for resources: all writes and all unknown types and namespaces are forbidden, and sensitive types
// require os:admin. A watch is checked once, when the stream starts.
type accessPolicy struct {
	definitions *definitions
	unsupported []resource.Type
}

func (p accessPolicy) check(ctx context.Context, access state.Access) error {
	if !access.Verb.Readonly() {
		return status.Error(codes.PermissionDenied, "write access is not allowed")
	}

	sensitivity, known := p.definitions.typeSensitivity(access.ResourceType)
	if !known || slices.Contains(p.unsupported, access.ResourceType) {
		return status.Error(codes.PermissionDenied, fmt.Sprintf("resource type %q is not supported", access.ResourceType))
	}

	if sensitivity == meta.Sensitive && !callFrom(ctx).roles.Includes(role.Admin) {
		return errNotAuthorized
	}

	if !p.definitions.hasNamespace(access.ResourceNamespace) {
		return status.Error(codes.PermissionDenied, fmt.Sprintf("namespace %q is not supported", access.ResourceNamespace))
	}

	return nil
}
