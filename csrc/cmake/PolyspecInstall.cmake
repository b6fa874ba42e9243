# Installs the library, its headers, and its packages for CMake and pkg-config.
# Embedders: find_package(polyspec), then link polyspec::polyspec; or pkg-config.
include(CMakePackageConfigHelpers)
install(TARGETS polyspec EXPORT polyspec-targets COMPONENT library)
install(DIRECTORY csrc/include/polyspec DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/polyspec)
install(EXPORT polyspec-targets NAMESPACE polyspec:: DESTINATION ${package_dir} COMPONENT library)
configure_package_config_file(csrc/cmake/polyspec-config.cmake.in polyspec-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(polyspec-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/polyspec-config.cmake"
              "${CMAKE_CURRENT_BINARY_DIR}/polyspec-config-version.cmake"
        DESTINATION ${package_dir} COMPONENT library)

# polyspec.pc names its prefix relative to itself, so that an installation can be moved. A C compiler does not add the
# C++ runtime that the static library needs.
foreach(place IN ITEMS LIBDIR INCLUDEDIR)
  string(TOLOWER pc_${place} variable)
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${place}}")
    set(${variable} "${CMAKE_INSTALL_${place}}")
  else()
    set(${variable} "\${prefix}/${CMAKE_INSTALL_${place}}")
  endif()
endforeach()
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  file(RELATIVE_PATH pc_prefix "${CMAKE_INSTALL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
else()
  file(RELATIVE_PATH pc_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
endif()
string(REGEX REPLACE "/$" "" pc_prefix "${pc_prefix}")
set(pc_private ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
list(REMOVE_ITEM pc_private c gcc gcc_s)
list(REMOVE_DUPLICATES pc_private)
list(TRANSFORM pc_private PREPEND -l)
if(POLYSPEC_CUDA)
  list(PREPEND pc_private "-L${CUDAToolkit_LIBRARY_DIR}" -lcudart_static -lrt -lpthread -ldl)
endif()
list(JOIN pc_private " " pc_private)
configure_file(csrc/cmake/polyspec.pc.in polyspec.pc @ONLY)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/polyspec.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
        COMPONENT library)
